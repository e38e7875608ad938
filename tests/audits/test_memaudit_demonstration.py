"""The demonstration of memaudit 0.1.0, audited here: the same verdict from the same losses and scores.

Source: https://github.com/mem-audit/memaudit, hf/space/demo-report.json at c68a9a9, `per_canary` and `membership`. The
values of 16 canaries, with 16 copies each, and of 100 controls are rounded to four decimals.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from flsim.attacks.audit.ranks import detection_at, p_values, ranks_among
from flsim.base.statistics import auroc, roc, share_interval


def values(text: str) -> NDArray[np.float64]:
    return np.array(text.split(), float)


# masked_nll: the mean loss of the secret's 25 tokens
LOSSES = values(
    """
    0.1159 0.1007 0.1168 0.1060 0.1206 0.1087 0.1043 0.1176
    0.1196 0.1045 0.2226 0.1064 0.1797 0.1640 0.1185 0.1158
    """
)
CONTROL_LOSSES = values(
    """
    10.4787 10.3888 10.6797 9.8893 10.3411 11.2548 10.2421 9.9505 11.6018 9.7059
    11.7237 10.5508 10.6955 10.6008 10.1968 11.1085 10.1211 10.6072 10.8367 10.8968
    10.9987 11.5231 10.2583 10.0249 10.6439 10.7370 10.9154 10.1782 9.6252 10.8723
    9.5638 9.2461 10.3126 11.4366 9.7407 10.9841 10.2061 10.6162 9.8334 9.8022
    10.2706 10.4369 10.6800 10.0388 10.4636 10.2017 10.0453 11.3721 10.1004 10.3606
    10.3332 10.1810 9.9746 11.1118 10.2182 10.3923 9.7195 10.4286 10.2119 9.5666
    10.0934 10.7125 10.7311 10.2684 10.6066 10.9046 10.0127 11.1998 10.7348 10.9871
    10.4536 10.4231 10.1915 11.2771 10.2310 9.6044 9.6038 10.5377 9.6508 10.6074
    10.5445 9.5167 11.0360 10.6958 10.3686 10.6297 11.0196 9.6704 11.0688 9.7120
    11.5594 10.7269 10.8920 11.0748 10.4188 10.6990 11.5449 10.9702 9.3425 9.8334
    """
)
# headline_score: Min-K%++ of the model minus that of the model before training
SCORES = values(
    """
    1.4931 1.5302 1.9909 1.9434 1.5228 1.6080 2.1076 1.7473
    1.9292 2.4708 1.8379 1.6183 2.1944 1.7138 1.8115 1.3581
    """
)
CONTROL_SCORES = -values(
    """
    10.9748 18.1526 12.4602 12.1082 17.6891 14.0951 9.4232 12.5682 22.9666 13.1895
    16.8953 14.0127 14.1406 16.9205 13.7066 19.6239 15.1321 12.8324 8.9146 14.8110
    11.0944 17.5244 20.3974 14.4055 11.3108 11.8073 20.2049 11.7870 13.2634 13.9855
    13.5838 14.3599 17.4000 21.2501 12.2545 17.5359 13.1338 14.3140 7.3247 18.7399
    20.4798 19.0132 19.1865 13.2418 12.5571 12.2358 17.9248 19.4010 23.8093 9.6110
    16.5301 16.4301 11.3893 17.0545 12.4506 22.7614 9.5685 23.1347 15.6509 13.0651
    14.4240 19.9531 12.8150 13.6532 12.4846 18.9876 14.5102 18.6934 15.8920 16.9359
    15.5801 11.6442 23.0632 17.0676 12.5381 11.2232 20.2979 15.5719 10.2959 12.0772
    17.8871 11.0736 16.9342 14.4423 16.4779 13.6341 15.0493 11.3498 16.3679 17.2707
    18.5055 17.5665 14.1851 16.8531 21.0043 11.6439 14.5375 20.0636 16.4713 10.5869
    """
)
INTERVAL = (0.7940927857921772, 1.0)  # ci_low, ci_high
ROC = (  # some of the published points: threshold, tpr, fpr
    *((1.4117, 0.9375, 0.0), (1.7921, 0.5, 0.0), (2.4708, 0.0625, 0.0), (-8.0061, 1.0, 0.01), (-9.4601, 1.0, 0.03)),
    *((-9.6654, 1.0, 0.05), (-11.0469, 1.0, 0.08), (-12.0984, 1.0, 0.19), (-14.3250, 1.0, 0.45)),
    *((-16.9033, 1.0, 0.65), (-19.0022, 1.0, 0.83), (-23.8093, 1.0, 1.0)),
)


def test_the_values_are_those_of_the_report() -> None:
    assert (len(SCORES), len(CONTROL_SCORES), len(LOSSES), len(CONTROL_LOSSES)) == (16, 100, 16, 100)
    assert CONTROL_SCORES.mean() == pytest.approx(-15.314034021724737, abs=1e-5)  # negative_controls
    assert CONTROL_SCORES.max() == pytest.approx(-7.324728277971929, abs=1e-4)  # threshold: 99% of the controls


def test_an_audit_of_the_losses_finds_each_canary_as_memaudit_does() -> None:
    """16 of 16 at 1% (n_detected), each with the smallest p-value that 100 controls allow."""
    ranks = ranks_among(-LOSSES, -CONTROL_LOSSES)
    assert p_values(ranks, 100).tolist() == [1 / 101] * 16
    found = detection_at(ranks, 100, 1)
    assert (found.detected, found.canaries, found.tpr) == (16, 16, 1.0)
    assert (found.tpr_low, found.tpr_high) == pytest.approx(INTERVAL)
    assert found.fpr <= 0.01


def test_the_scores_have_the_published_curve() -> None:
    curve = roc(SCORES, CONTROL_SCORES)
    points = {(round(fpr, 6), round(tpr, 6)) for fpr, tpr in zip(curve.fpr.tolist(), curve.tpr.tolist(), strict=True)}
    for threshold, tpr, fpr in ROC:
        shares = [float((scores >= threshold).mean()) for scores in (SCORES, CONTROL_SCORES)]
        assert shares == pytest.approx([tpr, fpr])
        assert (fpr, tpr) in points
    at = curve.at(0.01)
    assert (at.detected, at.tpr) == (16, 1.0)
    assert share_interval(at.detected, 16) == pytest.approx(INTERVAL)
    assert auroc(SCORES, CONTROL_SCORES) == 1.0  # auc
