"""What can go wrong between a process and the shared disk, each by its own name."""

import errno


class Fault(Exception):
    """Something between this process and the shared disk; the kinds below say what to do about it."""


class Missing(Fault):
    """Not there as far as this machine can see: not yet, or no more."""


class Exists(Fault):
    """The name is taken already."""


class Damaged(Fault):
    """The bytes are there and they are wrong."""


class Passing(Fault):
    """The disk does not answer properly just now; trying again later is the right thing."""


class Full(Fault):
    """No room, or over the quota."""


class Denied(Fault):
    """The disk refuses for a reason that will not go away by itself."""


class Refused(Fault):
    """What lies on the disk has a shape that none of us makes: a link, a device, a hostile name."""


_KINDS: dict[int, type[Fault]] = {
    errno.ENOENT: Missing,
    errno.EEXIST: Exists,
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), Full),
    **dict.fromkeys((errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ESPIPE, errno.EAGAIN), Refused),
    **dict.fromkeys(
        (
            *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EINTR, errno.EBUSY),
            *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
            *(errno.ENETDOWN, errno.ENETUNREACH, errno.EPIPE, errno.ENOLCK, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
        ),
        Passing,
    ),
}


def named(error: OSError, name: str) -> Fault:
    """The fault that an operating system's error means."""
    kind = _KINDS.get(error.errno or 0, Denied)
    return kind(f"{name}: {error.strerror or error}")
