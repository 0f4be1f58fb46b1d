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


class Denied(Passing):
    """The disk refuses: a server that was mounted read-only, a ticket that has run out, rights that were taken away.
    Somebody mends that. Whom it refuses from the start is not made to wait: `Store.prove` tells."""


class Unfit(Fault):
    """What this disk cannot do, or not for this process: no waiting helps."""


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
            *(errno.ECONNREFUSED, errno.ENETRESET, errno.ENONET, errno.ESHUTDOWN, errno.EPROTO, errno.ENOLINK),
            *(errno.ENODEV, errno.ENOMEDIUM, errno.ENODATA, errno.ETIME, errno.EBADE, errno.EUCLEAN, errno.EBADMSG),
        ),
        Passing,
    ),
    **dict.fromkeys(
        (
            *(errno.EROFS, errno.EACCES, errno.EPERM),
            *(errno.ENOKEY, errno.EKEYEXPIRED, errno.EKEYREVOKED, errno.EKEYREJECTED),
        ),
        Denied,
    ),
}


def named(error: OSError, name: str) -> Fault:
    """The fault that an operating system's error means."""
    kind = _KINDS.get(error.errno or 0, Unfit)
    return kind(f"{name}: {error.strerror or error}")
