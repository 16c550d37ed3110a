"""Every combination of models and KV settings, in measurements that are kept: a stopped run goes on."""
