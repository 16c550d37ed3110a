"""Rebuilds the command that was typed, so that errors can suggest the next one."""

from __future__ import annotations

from shlex import quote

import click
from click.core import ParameterSource

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def typed(*left_out: str) -> str:
    """``quantkit quantize SOURCE --recipe int4``: the running command with all that was given on its command
    line or by the environment, but for the parameters ``left_out`` and values that are the defaults."""
    context = click.get_current_context()
    words = ["quantkit", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in left_out or name not in context.params or context.get_parameter_source(name) not in _GIVEN:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Argument):
            words += [quote(str(item)) for item in (value if parameter.nargs != 1 else [value])]
            continue
        if value == parameter.get_default(context):
            continue
        option = max(parameter.opts, key=len)
        if isinstance(parameter, click.Option) and parameter.is_flag:
            words.append(option)
        else:
            words += [word for item in (value if parameter.multiple else [value])
                      for word in (option, quote(str(item)))]
    return " ".join(words)
