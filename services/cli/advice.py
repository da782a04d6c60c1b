"""What a newcomer may try next."""

import shutil
from pathlib import Path

from services.cli.state_dir import StateDir

EXAMPLE = """\
apiVersion: v1
kind: Pod
metadata: {name: first}
spec:
  schedulerName: volcano
  containers:
  - name: main
    image: busybox
    command: [sleep, "3600"]
    resources:
      limits:
        volcano.sh/vgpu-number: 1
        volcano.sh/vgpu-memory: 3000
        volcano.sh/vgpu-cores: 30"""


def next_steps(directory: StateDir, page: str = "") -> str:
    """Return commands that show the main job, as they can be pasted into a shell."""
    shown = f"\n  open {page}   # all of this, live" if page else ""
    flag = state_flag(directory)
    wants = "" if shutil.which("kubectl") else "   # install kubectl first: none is on PATH"
    return f"""Try next:
  export KUBECONFIG={directory.kubeconfig}{wants}
  kubectl apply -f - <<'EOF'
{EXAMPLE}
EOF
  kubectl exec first -- env       # the limits of its share
  leasehold gpus{flag}            # every device and its leases
  leasehold explain first{flag}   # why it runs where it runs
  leasehold trace first{flag}     # how long each step took{shown}
  leasehold down{flag}            # ends it, as Ctrl-C does without --headless"""


def state_flag(directory: StateDir) -> str:
    """Return the flag that leads other commands to the directory; none where it is the default."""
    default = StateDir.at(Path(".leasehold"))
    return "" if directory == default else f" --state {directory.root}"
