"""Requests drawn from the server's own OpenAPI document: no 500, no hang, no answer outside the document.

The same ones in every run, so that a find comes with the change that brings it about.
"""

import servers


def test_drawn_requests():
    statuses = servers.draw_requests("--generation-deterministic", "--max-examples", "35", timeout=500)
    assert not [status for status in statuses if status >= 500]
    assert statuses.count(200) >= 200 and statuses.count(400) >= 500, "valid and invalid ones were drawn"
