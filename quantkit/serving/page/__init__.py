"""The chat page at ``/``: plain HTML, CSS and scripts, put together to one document."""
