"""Which values of annotations name GPUs for a plugin of the container runtime; pure.

CRI-O, NRI plugins and others read CDI devices or device nodes under configurable keys, so only the
value decides.
https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

import posixpath
import re
from collections.abc import Mapping

TEXT_ANNOTATIONS = (
    "kubectl.kubernetes.io/last-applied-configuration",
    "kubernetes.io/description",
)
"""Text for people and kubectl, as Kubernetes defines: no runtime reads them."""

_PATHS = re.compile(r"[\w.~%/-]+", re.ASCII)
_LINES = re.compile(r"\\[nrt]")
_OTHER_ROOT = re.compile(r"^/proc/.*/(?:root|cwd)(?=/)")
"""Another view of the node's files."""
_NODES = re.compile(
    r"/dev/(?:nvidia|nvhost|nvmap|nvgpu|nvsciipc|dri(?![\w-])|dxg(?![\w-])|char/(?:195|226):)",
    re.ASCII | re.IGNORECASE,
)
"""Device nodes of GPUs; those in /dev/char by the major numbers of NVIDIA and of DRM."""

_CDI_NAMES = re.compile(r"(?<![\w.-])([\w.-]+)/([\w.-]+)(?:=|\\u003d)\w", re.ASCII | re.IGNORECASE)
"""VENDOR/CLASS=DEVICE, with the equals sign perhaps escaped in JSON."""
_GPU_VENDORS = ("nvidia", "leasehold")
_GPU_CLASSES = re.compile(r"(?:[\w.-]*[-_.])?(?:v?gpu|mig)s?(?:[-_\d][\w.-]*)?", re.IGNORECASE)

_MAJOR_NUMBER = (
    r"""(?i)\bmajor["\x27]?\s*:\s*["\x27]?(?:[&*!+?#]|195\b|226\b|0[\dbox_]|\d+_)"""
    r"""|&[\w-]+\s+["\x27]?major\b"""
)
"""Under any path: NVIDIA's, DRM's, or one that is not in plain decimal digits."""
_HIDDEN = (
    r"(?i)\\(?:u00|u000000|x)(?:2[def]|3[0-9a]|[46][1-9a-f]|[57][0-9a])"
    r"|[\w/.=-]\\\r?\n\s*[\w/.=-]|!!?binary|yaml\.org,2002"
)
"""Forms that no library writes: escapes of letters and digits, words over two lines, base64."""

_NODE_NAMES = r"(?:nv(?:idia|host|map|gpu|sciipc)|dri\b|dxg\b|char/(?:195|226):)"
_IN_DEV = rf"dev/(?:[\w.~%/-]*\.\./)?[./]*{_NODE_NAMES}"

RUNTIME_PATTERNS = {
    "device nodes": rf"(?i)(?:^|\\[nrt]|[^\w.~%/-])/[./]*{_IN_DEV}",
    "device nodes by other paths": rf"(?i)/(?:\.\.|root|cwd)/[./]*{_IN_DEV}",
    "CDI devices of GPU vendors": r"(?i)(?:nvidia|leasehold)[\w.-]*/[\w-]+(?:=|\\u003d)\w",
    "CDI devices of GPU classes": (
        r"(?i)[\w.-]/(?:[\w-]*gpu[\w-]*|(?:[\w.-]*[-_.])?(?:v?gpu|mig)s?(?:[-_\d][\w.-]*)?)"
        r"(?:=|\\u003d)\w"
    ),
    "major numbers": _MAJOR_NUMBER,
    "hidden letters": _HIDDEN,
}
r"""The same as regular expressions (RE2) for the API server, after `\/` was replaced by `/`.

It cannot resolve a path, so one with `..` or below another root is denied if it may lead to a GPU.
An expression may cost 1,000,000; a match costs a fortieth of the text's characters times the
pattern's. With at most 152 characters in each pattern, 256 KiB of annotations fit.
"""

_DIRECT = tuple(re.compile(pattern) for pattern in (_MAJOR_NUMBER, _HIDDEN))


def named_gpu(value: str) -> str:
    """Return the part of a value that names a GPU, or "".

    >>> named_gpu("nvidia.com/gpu=0")
    'nvidia.com/gpu=0'
    >>> named_gpu("nvidia.com/gpu.product")
    ''
    """
    text = value.replace(r"\/", "/")
    for path in _PATHS.findall(_LINES.sub(" ", text)):
        if not path.startswith("/"):
            continue
        resolved = _OTHER_ROOT.sub("", posixpath.normpath(f"/{path.lstrip('/')}"))
        if _NODES.match(resolved) or _NODES.match(f"{resolved}:"):
            return str(path)
    for name in _CDI_NAMES.finditer(text):
        if _is_gpu(*name.groups()):
            return name[0]
    hidden = next((match[0] for pattern in _DIRECT if (match := pattern.search(text))), "")
    return hidden.strip()


def _is_gpu(vendor: str, device_class: str) -> bool:
    """A class with a dot, as in `nvidia.com/gpu.product=...`, is a label of nodes."""
    if _GPU_CLASSES.fullmatch(device_class):
        return True
    by_vendor = any(name in vendor.lower() for name in _GPU_VENDORS)
    return "." not in device_class and (by_vendor or "gpu" in device_class.lower())


def annotations_with_gpus(annotations: Mapping[str, str]) -> dict[str, str]:
    read = {key: value for key, value in annotations.items() if key not in TEXT_ANNOTATIONS}
    return {key: name for key, value in read.items() if (name := named_gpu(value))}
