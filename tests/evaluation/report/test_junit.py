"""JUnit XML: what CI systems read of it."""

from xml.etree import ElementTree

import pytest

from quantkit.evaluation.gates.check import check_gate
from quantkit.evaluation.report.gates import render
from quantkit.testing.results import sample_results

CHILDREN = {"testsuites": {"testsuite"}, "testsuite": {"properties", "testcase"}, "properties": {"property"},
            "testcase": {"failure", "system-out"}, "property": set(), "failure": set(), "system-out": set()}
"""Of the elements of Jenkins' junit-10.xsd those that we write, and what each must and may have."""
REQUIRED = {"testsuite": {"name", "tests", "failures", "errors"}, "testcase": {"name"},
            "property": {"name", "value"}}
ALLOWED = {"testsuites": {"name", "tests", "failures", "errors"}, "failure": {"type", "message"},
           "testsuite": {*REQUIRED["testsuite"], "skipped"}, "testcase": {"name", "classname"},
           "property": REQUIRED["property"]}


def parsed(result):
    root = ElementTree.fromstring(render(result).encode())
    assert root.tag == "testsuites"
    for element in root.iter():
        assert {child.tag for child in element} <= CHILDREN[element.tag]
        assert REQUIRED.get(element.tag, set()) <= set(element.keys()) <= ALLOWED.get(element.tag, set())
    for suite in root:
        cases = suite.findall("testcase")
        assert len(suite.findall("properties")) == 1 and int(suite.get("tests")) == len(cases)
        assert int(suite.get("failures")) == sum(case.find("failure") is not None for case in cases)
    for name in ("tests", "failures"):
        assert int(root.get(name)) == sum(int(suite.get(name)) for suite in root)
    return root


@pytest.mark.parametrize("name", sample_results())
def test_every_result_is_what_ci_systems_read(name):
    parsed(sample_results()[name])


def test_what_a_tool_does_not_tell_is_left_out():
    *_, server, quantized = parsed(sample_results()["other tools"])
    numbers = {item.get("name"): item.get("value") for item in server.iter("property")}
    assert server.get("name") == "vLLM 127.0.0.1:8000" and numbers["tool"] == "vLLM"
    assert not numbers.keys() & {"bits_per_weight", "file_bytes", "peak_bytes", "kl_mean"}
    assert quantized.get("name") == "transformers smollm2 bitsandbytes nf4"


def test_a_gate_that_fails():
    result = sample_results()["ordinary"]
    result.gate = check_gate(result, "kl<0.01,decode>1.2x,int4:size<200MB")
    root = parsed(result)
    assert (root.get("tests"), root.get("failures")) == ("6", "1")
    reference, int8, int4 = root
    assert [case.get("name") for case in reference.iter("testcase")] == ["evaluated"]
    assert [case.get("name") for case in int8.iter("testcase")] == ["kl<0.01", "decode>1.2x"]
    failed, passed, scoped = int4.iter("testcase")
    failure = failed.find("failure")
    assert failure.get("message").startswith("int4: kl is 0.250 nats, which misses < 0.0100 nats by 0.240")
    assert failure.get("type") == "fail" and passed.find("failure") is None
    assert scoped.get("name") == "int4:size<200MB" and failed.get("classname") == "quantkit.int4"
    assert "limit: 0.01" in failed.find("system-out").text.splitlines()
    numbers = {item.get("name"): item.get("value") for item in int4.iter("property")}
    assert numbers["kl_mean"] == "0.25" and numbers["gate"] == result.gate.gate
    assert numbers["fingerprint"] == result.protocol.fingerprint and " to " in numbers["kl_mean.95"]


def test_without_a_gate_every_variant_passes():
    root = parsed(sample_results()["ordinary"])
    assert (root.get("tests"), root.get("failures")) == ("3", "0")
    assert [suite.get("name") for suite in root] == ["smollm2", "int8", "int4"]


def test_characters_that_xml_does_not_have():
    result = sample_results()["ordinary"]
    result.rows[1].method = "a\x00b\x1b[31m\ufffe\ud800 <&> 模型 \U0001f600"
    method = next(item.get("value") for item in parsed(result)[1].iter("property")
                  if item.get("name") == "method")
    assert method == "a\ufffdb\ufffd[31m\ufffd\ufffd <&> 模型 \U0001f600"
