"""Settings that came after runs had digests without them."""

OWN = ("algorithm", "sampler", "server_optimizer", "server_schedule", "optimizer", "schedule")
MILESTONES = ("milestones", "milestone_factor")
OPTIONS = tuple(f"{name}_options" for name in OWN)
INJECTED = ("injection_users", "injection_copies")
# Later settings are left out of a digest where they have their defaults, so that digests of old runs stay the same.
LATER = {
    "data": ("user_holdout", "shadow"),
    "canaries": ("insertions", "controls", "coins", "windows", "arm", "source", "injections", *INJECTED, "template"),
    "model": ("architecture", "layers", "heads", "filter_width", "options"),
    "training": (*OPTIONS, "server_schedule", "algorithm", *MILESTONES, *(f"server_{name}" for name in MILESTONES)),
    "local": ("schedule", *MILESTONES, "optimizer_options", "schedule_options"),
    "privacy": ("noise",),
    "evaluation": ("utility_only",),
    "audit": ("update_canaries", "canary_coins"),
}
