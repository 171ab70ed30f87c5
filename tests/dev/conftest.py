"""What the tests of the instruments share."""

import pytest
from cutlass_attn.tools.experiment import runner


@pytest.fixture(autouse=True)
def cores_are_free(monkeypatch):
    """Tests run beside each other: else CPU times would often not be compared."""
    monkeypatch.setattr(runner, "waited", lambda before, after: None)
