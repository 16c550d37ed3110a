"""The roofline: what bounds each operator on this machine, predicted and measured."""
