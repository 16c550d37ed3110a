"""Every combination of models and KV settings, in pieces of work that are kept: a stopped run goes on."""
