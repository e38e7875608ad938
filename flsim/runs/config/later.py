"""Settings that came after runs had digests without them."""

MILESTONES = ("milestones", "milestone_factor")
INJECTED = ("injection_users", "injection_copies")
# Later settings are left out of a digest where they have their defaults, so that digests of old runs stay the same.
LATER = {
    "data": ("user_holdout", "shadow"),
    "canaries": ("insertions", "controls", "coins", "windows", "arm", "source", "injections", *INJECTED, "template"),
    "model": ("architecture", "layers", "heads", "filter_width", "options"),
    "training": ("server_schedule", "algorithm", *MILESTONES, *(f"server_{name}" for name in MILESTONES)),
    "local": ("schedule", *MILESTONES),
    "privacy": ("noise",),
    "evaluation": ("utility_only",),
    "audit": ("update_canaries", "canary_coins"),
}
