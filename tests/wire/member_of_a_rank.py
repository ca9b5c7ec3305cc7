"""A member of a rank that counts the points it has passed; member 0 prints its port first.

usage: member_of_a_rank.py MEMBER COUNT TOKEN CERTIFICATES INTERVAL [ADDRESS]
"""

from __future__ import annotations

import os
import sys
import threading
import time

from certificates import credentials_of

from backstay._transport import FLAG, FollowingMember, LeadingMember, OwnMember
from backstay_rpc.control_pb2 import Peer

LOST = 81


def lost(member: int, why: str) -> None:
    print(f"member {member} is lost: {why}", flush=True)
    os._exit(LOST)  # the main thread may wait in a collective


def main() -> None:
    member, count, token, certificates, interval = sys.argv[1:6]
    peer = Peer(role="worker", index=3, incarnation=1, member=int(member))
    credentials = credentials_of(token, certificates)
    own = OwnMember(peer, int(count), credentials, lost, float(interval))
    if peer.member == 0:
        group = LeadingMember(own, "127.0.0.1")
        print(group.port, flush=True)
        assert group.linked(600) == []
    else:
        group = FollowingMember(own, sys.argv[6])
    ended, passed = threading.Event(), 0

    def read() -> None:
        sys.stdin.readline()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    while not group.share("ended", FLAG, ended.is_set):
        group.agree("count", FLAG, lambda: True, all)
        passed += 1
        if passed == 20:
            print("running", flush=True)
        time.sleep(0.001)
    group.close()
    print("ended", flush=True)


if __name__ == "__main__":
    main()
