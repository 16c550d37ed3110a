"""The section of a model card, and the metadata that the hub reads."""

import hashlib
import math

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from quantkit.checkpoint.card_block import CardBlock, with_block
from quantkit.checkpoint.reader import read_manifest
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.report.model_card import block_of_checkpoint, card_block, render
from quantkit.kv.spec import setting_of
from quantkit.quantization.run import quantize
from quantkit.support.errors import UsageError
from quantkit.testing import tiny_model
from quantkit.testing.results import sample_results

CARD = b"---\ntags:\n- quantkit\n---\n\n# m\n\n## Recipe\n"


@pytest.mark.parametrize("name", [name for name in sample_results() if name != "no model"])
def test_the_hub_reads_the_card_of_every_row(name):
    result = sample_results()[name]
    for row in result.rows:
        block = card_block(result, row)
        card = ModelCard(with_block(CARD, block).decode())
        assert card.data.tags == ["quantkit"]
        finite = any(math.isfinite(value.value) and result.measured[key].per != "timed run"
                     for key, value in row.metrics.items())
        assert bool(card.data.eval_results) == finite
        lines = block.markdown.splitlines()
        table = [line for line in lines if line.startswith("|")]
        assert len({line.count("|") for line in table}) == 1, "every line of the table has as many cells"
        assert "<" not in block.markdown and "\x1b" not in block.markdown


def test_values_arrive_as_they_were_measured():
    result = sample_results()["tasks"]
    row = result.rows[1]
    row.texts = {"prose.txt": {"kl_mean": Interval(0.25, 0.2, 0.3)},
                 "hf code": {"kl_mean": Interval(0.5, 0.4, 0.6)}}
    data = ModelCard(with_block(CARD, card_block(result, row)).decode()).data
    outcome = {(item.dataset_type, item.metric_type): item.metric_value for item in data.eval_results}
    assert outcome["prose.txt", "kl_mean"] == 0.25 and outcome["hf-code", "kl_mean"] == 0.5
    assert outcome["arc_easy", "acc"] == 0.5 and outcome["lambada", "perplexity"] == 25
    assert {item.task_type for item in data.eval_results} == {"text-generation"}
    assert not any("tok_s" in metric for _, metric in outcome), "speed is the machine's"


def test_the_section_has_values_tests_and_protocol():
    result = sample_results()["ordinary"]
    random = np.random.default_rng(0)
    for index, row in enumerate(result.rows):
        row.window_means = {"t": {"perplexity": list(3 + 0.02 * index + random.normal(0, 0.001, 20))}}
        row.items = {"arc_easy/acc": [1.0] * (60 - 20 * index) + [0.0] * (40 + 20 * index)}
        row.metrics["arc_easy/acc"] = Interval(0.6 - 0.2 * index, 0.1, 0.7)
    text = card_block(result, result.rows[1]).markdown
    assert "| KL, nats | 0.00400 (" in text and "| | this model | smollm2 |" in text
    assert "McNemar, exact" in text and "-20.0 pp" in text and "| worse |" in text
    assert "| perplexity | 2.0" in text and "sign flips over windows" in text
    assert result.protocol.fingerprint in text and result.protocol.cpu in text
    alone = card_block(result, result.rows[0]).markdown
    assert "KL" not in alone and "McNemar" not in alone and "perplexity" in alone


def test_the_file_has_a_block_for_every_variant():
    text = render(sample_results()["ordinary"])
    assert text.count("<!-- quantkit:eval -->") == text.count("<!-- /quantkit:eval -->") == 2
    metadata = text.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(metadata)["model-index"][0]["name"] == "int8"


def test_the_row_of_a_checkpoint(tmp_path):
    folder = quantize(str(tiny_model(tmp_path / "tiny")), "int8", tmp_path / "out").out
    digest = hashlib.sha256(read_manifest(folder).to_bytes()).hexdigest()
    result = sample_results()["KV settings"]
    for row in result.rows[3:]:
        row.manifest_sha256 = digest
    result.rows[3].kv = "int4"
    result.rows[4].kv = str(setting_of(read_manifest(folder).recipe))
    block = block_of_checkpoint(result, folder)
    assert isinstance(block, CardBlock) and block == card_block(result, result.rows[4])
    result.rows[4].kv = "fp8"
    assert block_of_checkpoint(result, folder) == card_block(result, result.rows[3])
    for row in result.rows[3:]:
        row.manifest_sha256 = "e" * 64
    with pytest.raises(UsageError, match="no row of") as caught:
        block_of_checkpoint(result, folder)
    assert digest[:12] in caught.value.why and "eeeeeeeeeeee" in caught.value.why
