"""The proof that a caller belongs to a job: the one place for the token and for TLS.

gRPC calls carry the token as metadata, and streams of frames in their first bytes. Nothing is encrypted yet, except the
streams whose credentials have contexts of TLS.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from . import AUTHORIZATION, bearer

__all__ = ["NOT_AUTHENTICATED", "Credentials"]

NOT_AUTHENTICATED: Final = "the call does not carry this job's token"


@dataclass(frozen=True)
class Credentials:
    """The proof that a pod sends to its peers and expects from its callers.

    Attributes:
        token: the job's secret. With an empty one, every call is refused.
        accepts: the context of TLS for streams that this pod accepts; None: they are not encrypted.
        connects: the same for streams that this pod opens.
    """

    token: str = field(repr=False)
    accepts: ssl.SSLContext | None = None
    connects: ssl.SSLContext | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata that a caller adds to a gRPC call."""
        return bearer(self.token)

    def admits(self, given: Iterable[str | bytes]) -> bool:
        """Returns whether a call belongs to this job; compares in constant time.

        Args:
            given: the call's values of the header ``authorization``.
        """
        values = list(given)
        if len(values) != 1 or not self.token:
            return False
        value = values[0] if isinstance(values[0], bytes) else values[0].encode()
        return hmac.compare_digest(value, f"Bearer {self.token}".encode())

    def proven(self, given: bytes) -> bool:
        """Returns whether `given` is the token; compares in constant time."""
        return bool(self.token) and hmac.compare_digest(given, self.token.encode())

    def admits_call(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Returns whether the metadata of a gRPC call carry the token, and no second one."""
        return self.admits(value for key, value in metadata if key == AUTHORIZATION)
