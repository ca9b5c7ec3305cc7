# The operator's image:  docker build -t ghcr.io/backstay-dev/operator:0.1.0 .
# BASE_IMAGE needs python3 3.11 or newer with venv (Debian: the packages python3 and python3-venv). Both stages use it, so the
# virtual environment can move from one to the other.
# Another package index:  --build-arg PIP_INDEX_URL=https://...
# Pass an index with a password, or a private certificate authority, as secrets, which no layer keeps:
#   --secret id=pip.conf,src=...  and  --secret id=ca.crt,src=...
# In pip.conf write  cert = /run/secrets/ca.crt  for that authority.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG PIP_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY images/locks/build.lock images/locks/operator.lock images/locks/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    python3 -m venv /opt/build \
    && /opt/build/bin/pip install --require-hashes -r images/locks/build.lock
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    python3 -m venv /opt/backstay \
    && /opt/backstay/bin/pip install --require-hashes --only-binary :all: -r images/locks/operator.lock
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
COPY images/trainer/backstay images/trainer/backstay
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /opt/wheels . \
    && /opt/backstay/bin/pip install --no-deps --no-index /opt/wheels/*.whl \
    && /opt/backstay/bin/pip check \
    && /opt/backstay/bin/pip uninstall --yes setuptools pip

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="backstay operator" \
      org.opencontainers.image.description="Runs TrainingJobs: JAX training with parameter servers that survives dead pods" \
      org.opencontainers.image.source="https://github.com/backstay-dev/backstay" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/backstay /opt/backstay
ENV PATH=/opt/backstay/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 65532:65532
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["python", "-m", "backstay_operator"]
