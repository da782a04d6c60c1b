# One image for every service: `docker run leasehold services.placer --help`.
# The target `simulated` adds the simulated cluster for compose.yaml; it is in no production image.
# BASE is any Debian with Python 3.11 or newer; REGISTRY is its prefix, with a slash at its end.
ARG REGISTRY=
ARG BASE=python:3.12.14-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

FROM ${REGISTRY}${BASE} AS source
WORKDIR /src
COPY locks locks
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --requirement locks/build.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY shared shared
COPY services services

# Placement is compiled, for which the compiler is installed in this stage.
FROM source AS wheel
RUN (command -v cc || (apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev)) \
 && HATCH_BUILD_HOOK_ENABLE_MYPYC=1 /opt/build/bin/hatchling build --directory /dist --target wheel \
 || (echo "Placement could not be compiled, as reported above: it is interpreted, and needs twice the CPU." \
 && /opt/build/bin/hatchling build --directory /dist --target wheel)

# The hook by which container runtimes have a container limited before it starts: static, as it runs on the host.
RUN mkdir -p /dist/libexec \
 && (gcc -static -O2 -s -std=gnu11 -Wall -Wextra -o /dist/libexec/leasehold-limit-hook services/node_agent/memory_limits/limit_hook.c \
 || echo "The hook could not be compiled, as reported above: the driver's limits on memory are not used.")

# The library that holds containers to their part of a GPU's time: it needs glibc 2.17 or newer of the container.
RUN (gcc -shared -fPIC -fvisibility=hidden -O2 -s -std=gnu11 -Wall -Wextra -Wl,-soname,libleasehold-time.so -Wl,-z,lazy \
 -o /dist/libexec/libleasehold-time.so services/node_agent/compute_time/*.c \
 || echo "The library could not be compiled, as reported above: compute by time is not offered.")

FROM source AS wheel-simulated
COPY simcluster simcluster
RUN /opt/build/bin/hatchling build --directory /dist --target wheel \
 && cd simcluster && /opt/build/bin/hatchling build --directory /dist --target wheel

# The interpreter has the same path in all stages, so that the environment can be copied.
FROM ${REGISTRY}${BASE} AS build
COPY locks/runtime.txt .
RUN python3 -m venv /opt/leasehold \
 && /opt/leasehold/bin/pip install --no-cache-dir --requirement runtime.txt
COPY --from=wheel /dist /dist
RUN mkdir -p /opt/leasehold/libexec && cp -r /dist/libexec /opt/leasehold
RUN /opt/leasehold/bin/pip install --no-cache-dir --no-deps /dist/*.whl \
 && /opt/leasehold/bin/pip uninstall --yes --quiet pip setuptools \
 && /opt/leasehold/bin/python -m compileall -q -f --invalidation-mode unchecked-hash /opt/leasehold/lib

FROM ${REGISTRY}${BASE} AS build-simulated
COPY locks/simulated.txt .
RUN python3 -m venv /opt/leasehold \
 && /opt/leasehold/bin/pip install --no-cache-dir --requirement simulated.txt
COPY --from=wheel-simulated /dist /dist
RUN /opt/leasehold/bin/pip install --no-cache-dir --no-deps /dist/*.whl
# The driver of the simulated GPUs is compiled here, since the image has no compiler.
ENV XDG_CACHE_HOME=/opt/leasehold/cache
RUN (command -v cc || (apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev)) \
 && /opt/leasehold/bin/python -c "from simcluster.gpu_driver.build import build; build()" \
 || echo "The driver could not be compiled, as reported above: nvidia-smi and gpu-load do not run in pods."

FROM ${REGISTRY}${BASE} AS runtime
LABEL org.opencontainers.image.title="leasehold" \
      org.opencontainers.image.description="GPU sharing for Kubernetes: every share is a lease" \
      org.opencontainers.image.licenses="Apache-2.0"
# Nothing is written outside of the volumes of a service.
ENV PATH=/opt/leasehold/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LEASEHOLD_HTTP=0.0.0.0:9100
RUN install -d -o 65532 -g 65532 /var/lib/leasehold /var/lib/webhook /var/lib/api /var/lib/credentials /var/lib/accounts
USER 65532:65532
WORKDIR /var/lib/leasehold
EXPOSE 9100
ENTRYPOINT ["python", "-m"]
CMD ["services.cli", "--help"]

FROM runtime AS simulated
ENV XDG_CACHE_HOME=/opt/leasehold/cache
COPY --from=build-simulated /opt/leasehold /opt/leasehold

FROM runtime
COPY --from=build /opt/leasehold /opt/leasehold
