"""Scores with shared prefixes through the GPU's kernels: pages are forked, and tokens taken back."""

import pytest
import torch

from quantkit.evaluation.tasks import prefix_plan, prefix_scores
from quantkit.evaluation.tasks.scoring import Scorer, ScoringRequest
from quantkit.ops import gpu
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.loader import load
from quantkit.testing import tiny_model

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "dtype": "float32"}
EXAMPLES = tuple(range(10, 76))
REQUESTS = [ScoringRequest((*EXAMPLES, 100), (5, 6)), ScoringRequest((*EXAMPLES, 100), (5, 7)),
            ScoringRequest((*EXAMPLES, 101), (8,)), ScoringRequest((*EXAMPLES[:64], 9), (8, 9, 4)),
            ScoringRequest(EXAMPLES[:3], EXAMPLES[3:5]), ScoringRequest((7,), (8,))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 20})])
def test_as_on_the_cpu_and_in_any_company(family, changes, tmp_path, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the kernels run on it instead")
    folder = str(tiny_model(tmp_path / "m", family, **SMALL, **changes))
    expected = Scorer(load(folder, dtype="float32")).score(REQUESTS)
    monkeypatch.setattr(gpu, "SIMULATE", True)
    loaded = load(folder, dtype="float32")
    assert isinstance(loaded.model, GpuModel)
    monkeypatch.setattr(prefix_scores, "STEP_TOKENS", {"cpu": 48})
    scores = Scorer(loaded, batch=3).score(REQUESTS)
    for score, other in zip(scores, expected, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=1e-3) and score.greedy == other.greedy
    assert [Scorer(loaded).score([request])[0] for request in REQUESTS[:4]] == scores[:4]
    plan = prefix_plan.plan_prefixes([request.context + request.continuation[:-1] for request in REQUESTS],
                                     3, 48)
    assert any(run.inherited for run in plan.runs)
