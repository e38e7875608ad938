"""The benchmark of LoRA adapters has a row for one user at a time, and a row for each size of a block."""

from benchmarks.lora import LoraBenchHParams, bench_lora, describe

SMALL = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 12}


def test_a_row_for_each_size() -> None:
    hparams = LoraBenchHParams(SMALL, 60, rank=2, single=2, at_once=(2, 3))
    rows = list(bench_lora(hparams))
    assert [row["at_once"] for row in rows] == [1, 2, 3]
    assert [row["ratio"] for row in rows] == [row["users_per_second"] / rows[0]["users_per_second"] for row in rows]
    text = describe(rows, hparams).splitlines()
    assert "one user of 2 steps of 48 tokens" in text[0]
    assert len(text) == 2 + len(rows)
