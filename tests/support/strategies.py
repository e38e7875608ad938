"""Hypothesis strategies of users and of settings of local training."""

from hypothesis import strategies as st

from flsim.training.hparams import LocalHParams

users_strategy = st.lists(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=7), min_size=1, max_size=5)
hparams_strategy = st.builds(
    LocalHParams,
    epochs=st.integers(1, 2),
    batch_size=st.integers(1, 8),
    learning_rate=st.sampled_from((0.05, 0.5)),
    optimizer=st.sampled_from(("sgd", "momentum", "adam", "rmsprop")),
    momentum=st.sampled_from((0.0, 0.9)),
    gradient_clip=st.none() | st.sampled_from((0.01, 0.3, 100.0)),
    proximal=st.sampled_from((0.0, 0.7)),
    max_records=st.none() | st.integers(1, 7),
)
