"""Makes a plugin's folder from templates: ``quantkit plugins new``."""
