"""Members of ranks that count the points they have passed; member 0 prints its port first.

The program imports once, and forks each member. Its standard input is a socket with requests:

    MEMBER COUNT TOKEN INTERVAL [ADDRESS]   with the member's standard input and output; the answer is its process id
    end PROCESS                             the answer is the exit status, after the process has ended
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from backstay._transport import FLAG, FollowingMember, LeadingMember, OwnMember
from backstay_rpc.control_pb2 import Peer
from backstay_rpc.credentials import Credentials

LOST = 81


def lost(member: int, why: str) -> None:
    print(f"member {member} is lost: {why}", flush=True)
    os._exit(LOST)  # the main thread may wait in a collective


def run(member: str, count: str, token: str, interval: str, *address: str) -> None:
    peer = Peer(role="worker", index=3, incarnation=1, member=int(member))
    own = OwnMember(peer, int(count), Credentials(token), lost, float(interval))
    if peer.member == 0:
        group = LeadingMember(own, "127.0.0.1")
        print(group.port, flush=True)
        assert group.linked(600) == []
    else:
        group = FollowingMember(own, *address)
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


def main() -> None:
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, 4096, 2)
            if not request:
                return
            words = request.decode().split()
            if words[0] == "end":
                answer = os.waitstatus_to_exitcode(os.waitpid(int(words[1]), 0)[1])
            elif (answer := os.fork()) == 0:
                break
            requests.send(str(answer).encode())
            for each in descriptors:
                os.close(each)
    for standard, each in enumerate(descriptors):
        os.dup2(each, standard)
        os.close(each)
    run(*words)


if __name__ == "__main__":
    main()
