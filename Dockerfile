# One image for every service: `docker run leasehold services.placer --help`.
# The target `simulated` adds the simulated cluster for compose.yaml; it is in no production image.
# BASE is any Debian with Python 3.11 or newer; REGISTRY is its prefix, with a slash at its end.
ARG REGISTRY=
ARG BASE=python:3.12-slim-bookworm

FROM ${REGISTRY}${BASE} AS source
WORKDIR /src
COPY pyproject.toml README.md ./
COPY proto proto
COPY shared shared
COPY services services

# The interpreter has the same path in all stages, so that the environment can be copied.
FROM source AS build
RUN python3 -m venv /opt/leasehold \
 && /opt/leasehold/bin/pip install --no-cache-dir . \
 && /opt/leasehold/bin/pip uninstall --yes --quiet pip setuptools \
 && find /opt/leasehold -name __pycache__ -prune -exec rm -rf {} +

FROM source AS build-simulated
COPY simcluster simcluster
RUN python3 -m venv /opt/leasehold \
 && /opt/leasehold/bin/pip install --no-cache-dir '.[simulated]'

FROM ${REGISTRY}${BASE} AS runtime
LABEL org.opencontainers.image.title="leasehold" \
      org.opencontainers.image.description="GPU sharing for Kubernetes: every share is a lease"
# Nothing is written outside of the volumes of a service.
ENV PATH=/opt/leasehold/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LEASEHOLD_HTTP=0.0.0.0:9100
RUN install -d -o 65532 -g 65532 /var/lib/leasehold /var/lib/webhook /var/lib/dashboard /var/lib/credentials
USER 65532:65532
WORKDIR /var/lib/leasehold
EXPOSE 9100
ENTRYPOINT ["python", "-m"]
CMD ["services.cli", "--help"]

FROM runtime AS simulated
COPY --from=build-simulated /opt/leasehold /opt/leasehold

FROM runtime
COPY --from=build /opt/leasehold /opt/leasehold
