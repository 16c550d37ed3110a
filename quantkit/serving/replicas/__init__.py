"""One server of several replicas: each has the engines of all models, on this machine or on others."""
