# Gateway and trainer: one image, two commands. LOCK=cpu also serves a gateway on any host.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ARG LOCK=cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PYTHONUNBUFFERED=1 ADAFLASH_CACHE=/var/cache/adaflash HF_HOME=/var/cache/adaflash/hf

# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 adaflash \
 && mkdir -p /app /drafters /state /var/cache/adaflash/models /var/cache/adaflash/hf \
 && chown -R adaflash /app /drafters /state /var/cache/adaflash

USER 10001
WORKDIR /app
COPY --chown=adaflash requirements requirements
COPY --chown=adaflash scripts scripts
COPY --chown=adaflash pyproject.toml README.md ./
COPY --chown=adaflash adaflash adaflash
COPY --chown=adaflash serving serving
COPY --chown=adaflash trainer trainer
COPY --chown=adaflash demo demo
RUN python scripts/setup_env.py --kind "${LOCK}"

ENV PATH=/app/.venv/bin:$PATH
EXPOSE 8000 30002
VOLUME ["/drafters", "/state"]
ENTRYPOINT ["adaflash"]
CMD ["gateway", "--help"]
