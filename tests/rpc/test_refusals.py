"""The list of refusals gives each one a status of gRPC, and each caller finds what to do next."""

from __future__ import annotations

import grpc
import pytest

from backstay_rpc.refusals import FINAL, JOIN_AGAIN, AfterRefusal, RefusalCode


@pytest.mark.parametrize("code", RefusalCode)
def test_a_refusal_travels_as_the_name_of_a_status(code: RefusalCode) -> None:
    assert grpc.StatusCode[code].name == code
    assert RefusalCode(str(code)) is code


def test_a_refusal_is_never_both_final_and_corrected_by_joining() -> None:
    assert not FINAL & JOIN_AGAIN
    others = set(RefusalCode) - FINAL - JOIN_AGAIN
    assert others == {RefusalCode.JOB_FAILED, RefusalCode.LATE}
    assert RefusalCode.LATE.after is AfterRefusal.RETRY
    assert "PERMISSION_DENIED" in FINAL
    assert "FAILED_PRECONDITION" in JOIN_AGAIN
