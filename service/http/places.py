"""Places for bodies that are arriving, shared fairly between addresses when they run short."""

from typing import Protocol


class Guest(Protocol):
    """Something that takes places and can be sent away."""

    address: str
    places: int

    def send_away(self) -> None:
        """Give the places to somebody else."""
        ...


class Places:
    """`count` places. When they are taken, whoever holds the most gives some to who holds less.

    An address may take all places while nobody else wants one; another address is then still let
    in, at the cost of the oldest guest of the address that holds the most.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._guests: dict[Guest, None] = {}

    @property
    def taken(self) -> int:
        """Places that are not free."""
        return sum(guest.places for guest in self._guests)

    def enter(self, guest: Guest) -> bool:
        """Take the places of `guest`; False if there are none for it."""
        guest.places = min(guest.places, self.count)
        while self.taken + guest.places > self.count:
            oldest = self._of_the_greediest(guest)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.send_away()
        self._guests[guest] = None
        return True

    def leave(self, guest: Guest) -> None:
        """Give the places of `guest` back."""
        self._guests.pop(guest, None)

    def _of_the_greediest(self, newcomer: Guest) -> Guest | None:
        held: dict[str, int] = {}
        for guest in self._guests:
            held[guest.address] = held.get(guest.address, 0) + guest.places
        address = max(held, key=lambda name: held[name])
        after = held.get(newcomer.address, 0) + newcomer.places
        if address == newcomer.address or held[address] <= after:
            return None
        return next(guest for guest in self._guests if guest.address == address)
