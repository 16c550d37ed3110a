"""For plugin authors: tiny models, and a check for each kind of thing that a plugin registers.

A check puts what it is given to the work that quantkit would give it, ordinary and awkward, and raises
PluginError where a promise of its base type is broken. It can be called in a test of any framework.
"""

from quantkit.testing.methods import METHOD_SPECS, check_method
from quantkit.testing.metrics import check_metric
from quantkit.testing.reporters import check_reporter
from quantkit.testing.results import sample_results
from quantkit.testing.tiny import CHAT_TEMPLATE, FAMILIES, VOCAB, tiny_model, tiny_tokenizer, tiny_weights
from quantkit.testing.transforms import check_transform

__all__ = ["CHAT_TEMPLATE", "FAMILIES", "METHOD_SPECS", "VOCAB", "check_method", "check_metric",
           "check_reporter", "check_transform", "sample_results", "tiny_model", "tiny_tokenizer",
           "tiny_weights"]
