"""Messages of any error."""

from __future__ import annotations

import pytest

from lightning_osdp.errors import MAX_MESSAGE, format_error
from tests.support.odd_errors import ODD_ERRORS


@pytest.mark.parametrize("kind", list(ODD_ERRORS))
def test_message_of_any_error_is_text_that_can_be_sent(kind: str) -> None:
    make, said = ODD_ERRORS[kind]
    error = make()
    text = format_error(error)
    assert text.startswith(said)
    assert len(text.encode()) < 2 * MAX_MESSAGE
