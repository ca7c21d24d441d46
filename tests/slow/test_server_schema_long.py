"""Ten minutes of requests drawn from the OpenAPI document."""

import pytest

import servers


@pytest.mark.slow
def test_drawn_requests_for_ten_minutes():
    statuses = servers.draw_requests(seconds=600)
    assert not [status for status in statuses if status >= 500]
    assert statuses.count(200) >= 100
