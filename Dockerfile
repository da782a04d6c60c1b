# One image for every service: `docker run leasehold services.placer --help`.
# BASE is any Debian with Python 3.11 or newer; REGISTRY is put before it, with a slash at its end.
ARG REGISTRY=
ARG BASE=python:3.12-slim-bookworm

FROM ${REGISTRY}${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md ./
COPY proto proto
COPY shared shared
COPY services services
# Where the interpreter lies is the same in both stages, so that the environment can be copied.
RUN python3 -m venv /opt/leasehold \
 && /opt/leasehold/bin/pip install --no-cache-dir '.[simulated]' \
 && /opt/leasehold/bin/pip uninstall --yes --quiet pip setuptools \
 && find /opt/leasehold -name __pycache__ -prune -exec rm -rf {} +

FROM ${REGISTRY}${BASE}
LABEL org.opencontainers.image.title="leasehold" \
      org.opencontainers.image.description="GPU sharing for Kubernetes: every share is a lease"
COPY --from=build /opt/leasehold /opt/leasehold
# Nothing is written below /: what a service keeps lies in the volumes that it is given.
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
