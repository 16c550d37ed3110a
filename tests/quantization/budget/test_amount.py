"""What counts as a budget."""

from fractions import Fraction

import pytest

from quantkit.quantization.budget.amount import parse_budget, parse_bytes
from quantkit.support.errors import UsageError


@pytest.mark.parametrize("text, bits", [("4.25bpw", Fraction(17, 4)), (" 3 BPW ", 3),
                                        ("0.1bpw", Fraction(1, 10))])
def test_bits_a_weight(text, bits):
    budget = parse_budget(text)
    assert budget.bits == bits and budget.bytes is None and budget.text == text.strip()


@pytest.mark.parametrize("text, size", [("5GB", 5 * 10**9), ("5GiB", 5 * 2**30), ("1.5 gb", 15 * 10**8),
                                        ("700MB", 7 * 10**8), ("512MiB", 2**29), ("12kB", 12_000),
                                        ("99B", 99)])
def test_bytes(text, size):
    budget = parse_budget(text)
    assert budget.bytes == size and budget.bits is None


@pytest.mark.parametrize("text", ["", "4.25", "GB", "-5GB", "0bpw", "0.0GB", "5 litres", "1e9B", "٤bpw",
                                  "4..2bpw", "4,25bpw", "nanbpw", "9" * 40 + "GB"])
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="is no budget") as caught:
        parse_budget(text)
    assert "--budget 4.25bpw" in caught.value.next


def test_bits_are_of_the_linears_alone_and_bytes_of_everything():
    assert parse_budget("4.1bpw").linear_bytes(weights=1000, other_bytes=77) == 512  # of 512.5
    assert parse_budget("1kB").linear_bytes(weights=1000, other_bytes=77) == 923


@pytest.mark.parametrize("text", ["", "16", "GB", "0GB", "-1GB", "1e3GB", "4.25bpw", "nanGB",
                                  "infGB", "0.1b", "16 GB RAM"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match=r"--memory .* is no size"):
        parse_bytes(text, "--memory")
