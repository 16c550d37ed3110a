"""The page of ``report.html``: its template, style, script and what is filled in."""
