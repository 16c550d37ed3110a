"""What the kit says of an exception that a stranger's code raises."""

import pytest

from quantkit.support.errors import CheckpointError, PluginError, SpecError
from quantkit.testing.contract import Contract

CONTRACT = Contract("method 'mine'", "quantkit.quantization.methods.base")


class Unprintable(Exception):
    """An exception whose text can't be had."""

    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(("error", "says"), [
    (ValueError("two\n  lines"), "quantize raises ValueError: two lines"),
    (KeyError(), "quantize raises KeyError"),
    (SpecError("4 bits are odd", why="3 isn't"), "quantize raises SpecError: 4 bits are odd; 3 isn't"),
    (Unprintable(), "quantize raises Unprintable: its text can't be had, which raises ValueError")])
def test_an_exception_is_told_in_one_line(error, says):
    def fail():
        raise error

    with pytest.raises(PluginError) as caught:
        CONTRACT.call("quantize", fail)
    assert caught.value.what == f"method 'mine': {says}"
    with pytest.raises(PluginError) as caught:
        CONTRACT.refuses("quantize", fail, accepted="it takes all", remedy="raise CheckpointError",
                         kind=CheckpointError)
    assert (caught.value.what, caught.value.next) == (f"method 'mine': {says}", "raise CheckpointError")
