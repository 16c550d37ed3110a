"""For plugin authors: tiny models, and a check for each kind of thing that a plugin registers.

A check puts what it is given to the work that quantkit would give it, ordinary and awkward, and raises
PluginError where a promise of its base type is broken. It can be called in a test of any framework.
"""

from quantkit.testing.architectures import check_architecture
from quantkit.testing.codecs import check_codec
from quantkit.testing.drafters import check_drafter
from quantkit.testing.formats import FORMAT_SPECS, check_format
from quantkit.testing.kernels import check_kernel
from quantkit.testing.methods import METHOD_SPECS, check_method
from quantkit.testing.metrics import check_metric
from quantkit.testing.policies import check_policy
from quantkit.testing.reporters import check_reporter
from quantkit.testing.results import sample_results
from quantkit.testing.sources import check_source
from quantkit.testing.tiny import (
    CHAT_TEMPLATE,
    FAMILIES,
    VOCAB,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
    tiny_weights,
)
from quantkit.testing.transforms import check_transform

__all__ = [
    "CHAT_TEMPLATE",
    "FAMILIES",
    "FORMAT_SPECS",
    "METHOD_SPECS",
    "VOCAB",
    "check_architecture",
    "check_codec",
    "check_drafter",
    "check_format",
    "check_kernel",
    "check_method",
    "check_metric",
    "check_policy",
    "check_reporter",
    "check_source",
    "check_transform",
    "sample_results",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
    "tiny_weights",
]
