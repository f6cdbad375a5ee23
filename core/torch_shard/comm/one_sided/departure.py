"""The end of a rank's process: it serves on until all ranks have come to the end, since another one may still read its shards.

Rank 0 collects the goodbyes, and answers when all have come, so that a rank makes one connection however many ranks there are.
A rank whose process is gone counts as gone, and a rank that ends by an exception does not wait for anybody. A rank does not wait
either if another one waits for it in a collective: it will never come there, and that rank hears of it when its process is gone.
"""

from __future__ import annotations

import multiprocessing.util
import sys
import time
import weakref

from ...errors import MissingRankError
from ...log import ANY_RANK, logger
from .. import work
from .partners import Partners
from .service import Service

_LOOK = 1.0  # seconds between two looks at ranks that have not said goodbye
_SLOW = 10.0  # seconds after which a rank says what it waits for

# Other threads get a pause, after the goodbye, whose priority is higher, to free the tensors of collectives that have just
# ended. A thread of Gloo that frees the last reference to a tensor needs the interpreter's lock. If it asks for the lock when the
# interpreter is shutting down, CPython before 3.14 ends the thread inside the tensor's destructor, which C++ answers by ending
# the process ("terminate called without an active exception").
multiprocessing.util.Finalize(None, time.sleep, (0.1,), exitpriority=-1)


def stay_until_all_leave(service: Service, partners: Partners, seconds: float) -> None:
    """Have this process serve on at its end, for at most `seconds`. Neither object is kept alive."""
    # Multiprocessing's finalizers run at the end of its child processes, too, which atexit's functions do not.
    multiprocessing.util.Finalize(
        service, _stay, (weakref.ref(service), weakref.ref(partners), seconds), exitpriority=0
    )


def _waits_in(partners: Partners, rank: int, issued: int) -> str | None:
    """Return where `rank` waits in a collective to which this rank, after its `issued` comparisons, never comes.

    The result is "" if `rank` waits in no such collective, and None if it is gone.
    """
    try:
        answer = partners.ask(rank, ask="presence")
    except MissingRankError:
        return None
    waits = answer["issued"] > issued and answer["place"].startswith(f"{work.__name__}:")
    return f"{answer['issued']} {answer['place']}" if waits else ""


def _stay(service_ref: weakref.ref[Service], partners_ref: weakref.ref[Partners], seconds: float) -> None:
    service, partners = service_ref(), partners_ref()
    if service is None or partners is None or sys.exc_info()[0] is not None or hasattr(sys, "last_value"):
        return
    models = service.leave()  # which are kept alive as long as this function runs
    if not models:
        return
    deadline, told = time.monotonic() + seconds, False
    begin = time.monotonic()
    missing = set(range(len(partners))) - {service.rank} if service.rank == 0 else {0}
    try:
        if service.rank != 0:
            partners.tell(0, ask="farewell", sender=service.rank)
        waiting: dict[int, str] = {}  # by rank, where it waits in a collective that this rank never comes to
        while missing and time.monotonic() < deadline:
            seen, waiting = waiting, {}
            for rank in service.wait_for_farewells(missing, _LOOK):
                place = _waits_in(partners, rank, service.issued)
                if place is None:
                    missing.discard(rank)
                elif place:
                    waiting[rank] = place
            missing -= service.farewells
            if any(seen.get(rank) == place for rank, place in waiting.items()):
                return
            if missing and not told and time.monotonic() > begin + _SLOW:
                told = True
                logger.warning(
                    "rank %d is done, and stays until ranks %s have ended, too, since they may read its part of the model.",
                    service.rank,
                    sorted(missing),
                    extra=ANY_RANK,
                )
    except MissingRankError:
        return  # rank 0 is gone, so nobody could be told that this rank is
    for rank in range(1, len(partners)) if service.rank == 0 else ():
        try:
            partners.tell(rank, ask="farewell", sender=0)
        except MissingRankError:
            continue
    del models
