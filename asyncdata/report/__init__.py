"""The report, a page that shows a run: values in, one HTML file out.

``figures`` has the numbers and the geometry of the charts, ``page`` puts them into the templates of ``assets``.
What a run wrote comes from ``telemetry``; the commands of ``cli`` read it. Nothing here reads a file of the user.
"""
