"""Ten minutes of requests drawn from the OpenAPI document, others in every run."""

import pytest

import servers


@pytest.mark.slow
def test_drawn_requests_for_ten_minutes():
    statuses = servers.draw_requests("--max-time", "600", timeout=900)
    assert not [status for status in statuses if status >= 500]
    assert statuses.count(200) >= 100
