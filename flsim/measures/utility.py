"""The utility of the model on test text: Recall@1 and perplexity; see `flsim.measures.prediction`."""

from flsim.measures.measure import Measure, ModelProbe
from flsim.measures.quantity import Quantity

ACCURACY = Quantity(
    name="accuracy",
    description="Recall@1 on test text: how many of the words there are the model's first choice.",
    better="higher",
    subject="model",
    title="Accuracy",
    heading="Acc.",
    format="{:.1f}",
    is_percentage=True,
    is_standard=True,
    places=("table", "compare", "report"),
    caption="Accuracy on test text",
    axis="Recall@1",
)
ACCURACY_ALL_TOKENS = Quantity(
    name="accuracy_all_tokens",
    description="Recall@1 on test text over all tokens, ends of records and unknown words included.",
    better="higher",
    subject="model",
    is_percentage=True,
    places=(),
)
PERPLEXITY = Quantity(
    name="perplexity",
    description="Perplexity on test text.",
    better="lower",
    subject="model",
    title="Perplexity",
    heading="Perp.",
    format="{:.1f}",
    is_log=True,
    is_standard=True,
    places=("table", "plot", "compare", "report"),
    caption="Perplexity on test text",
    axis="perplexity",
)


def utility(probe: ModelProbe) -> dict[str, float]:
    """Predict every record of the chosen users, and return the utility."""
    from flsim.measures.prediction import utility as predicted

    sums = predicted(probe.predict, probe.test, probe.chosen)
    return {
        ACCURACY.name: sums.accuracy,
        ACCURACY_ALL_TOKENS.name: sums.accuracy_all_tokens,
        PERPLEXITY.name: sums.perplexity,
    }


UTILITY = Measure("utility", utility, (ACCURACY, ACCURACY_ALL_TOKENS, PERPLEXITY), "accuracy and perplexity")
