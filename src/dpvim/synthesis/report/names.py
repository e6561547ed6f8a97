"""Names of the files that reports are written to, and the stamp on those with original data."""

NOT_FOR_RELEASE = "NOT FOR RELEASE"
REPORT = "report.html"
COMPARISON = f"report-{NOT_FOR_RELEASE.replace(' ', '-')}.html"
