"""The subresources that are not a part of their object: scale, eviction, binding, and the logs of a pod."""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp import web

from backstay_cluster.apiserver import codec, request
from backstay_cluster.apiserver.errors import (
    ApiError,
    bad_request,
    conflict,
    invalid,
    method_not_allowed,
    required,
)
from backstay_cluster.apiserver.handlers import ApiAnswer, Call, Handlers, success
from backstay_cluster.apiserver.objects import Obj, copy, dig, encode, meta, now
from backstay_cluster.apiserver.request import Target
from backstay_cluster.apiserver.rest import Api, DeleteOptions

_LOG_OPTIONS = ("follow", "tailLines", "limitBytes", "sinceSeconds", "sinceTime", "timestamps", "previous", "stream")


class Subresources:
    """Serves the subresources. `token` is the bearer token for the kubelet."""

    def __init__(self, api: Api, handlers: Handlers, token: str) -> None:
        self._api = api
        self._handlers = handlers
        self._token = token

    def serves(self, target: Target) -> bool:
        """Returns whether this class serves the target."""
        return target.subresource in {"scale", "eviction", "binding"}

    def dispatch(self, target: Target, call: Call) -> ApiAnswer:
        """Answer a request.

        Raises:
            ApiError: the error of the request.
        """
        if target.subresource == "scale":
            return self._scale(target, call)
        if call.method != "POST":
            raise method_not_allowed()
        return self._evict(target, call) if target.subresource == "eviction" else self._bind(target, call)

    # Scale

    def _paths(self, target: Target) -> tuple[str, str, str]:
        scale = self._handlers.custom(target.resource).scale or {}
        return scale["specReplicasPath"], scale["statusReplicasPath"], scale.get("labelSelectorPath", "")

    def _view(self, target: Target, obj: Obj) -> Obj:
        spec, status, selector = self._paths(target)
        data = obj["metadata"]
        shown = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
        view: Obj = {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {k: data[k] for k in shown if k in data},
            "spec": {"replicas": dig(obj, *_steps(spec)) or 0},
            "status": {"replicas": dig(obj, *_steps(status)) or 0},
        }
        if selector and (text := dig(obj, *_steps(selector))):
            view["status"]["selector"] = text
        if not view["spec"]["replicas"]:
            view["spec"] = {}
        return view

    def _scale(self, target: Target, call: Call) -> ApiAnswer:
        resource, key = target.resource, self._handlers.key(target)
        stored = self._api.get(resource, key)
        view = self._view(target, stored.obj)
        if call.method == "GET":
            return ApiAnswer(encode(view))
        if call.method == "PATCH":
            self._handlers.check_patch_type(resource, call.content_type)
            change = self._handlers.read_patch(call)
            wanted = self._handlers.apply(resource, view, change, call.content_type)
        elif call.method == "PUT":
            wanted = codec.read_object(resource, call.body, call.content_type, "Scale")
        else:
            raise method_not_allowed()
        clean, _ = codec.decode_builtin(resource, wanted, type_name="V1Scale", kind="Scale", version="autoscaling/v1")
        version = meta(clean).get("resourceVersion")
        if version and version != stored.obj["metadata"]["resourceVersion"]:
            raise conflict(resource.group, resource.plural, target.name)
        replicas = dig(clean, "spec", "replicas") or 0
        if replicas < 0:
            from backstay_cluster.apiserver.errors import invalid_value

            text = "must be greater than or equal to 0"
            raise invalid("autoscaling", "Scale", target.name, [invalid_value("spec.replicas", replicas, text)])
        changed: Obj = copy(stored.obj)
        place: Any = changed
        *parents, last = _steps(self._paths(target)[0])
        for step in parents:
            place = place.setdefault(step, {})
        place[last] = replicas
        stored = self._api.update(resource, key, changed, dry_run=request.dry_run(call.query))
        return ApiAnswer(encode(self._view(target, stored.obj)))

    # Eviction and binding

    def _evict(self, target: Target, call: Call) -> ApiAnswer:
        resource, key = target.resource, self._handlers.key(target)
        wanted = codec.read_object(resource, call.body, call.content_type, "Eviction")
        clean, _ = codec.decode_builtin(resource, wanted, type_name="V1Eviction", kind="Eviction", version="policy/v1")
        options = clean.get("deleteOptions") or {}
        dry = request.dry_run(call.query, options)
        stored = self._api.get(resource, key)
        preconditions = options.get("preconditions") or {}
        if not dry and not stored.obj["metadata"].get("deletionTimestamp"):

            def disrupted(obj: Obj) -> None:
                others = [c for c in dig(obj, "status", "conditions") or [] if c.get("type") != "DisruptionTarget"]
                condition = {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": "EvictionByEvictionAPI",
                    "message": "Eviction API: evicting",
                    "lastProbeTime": None,
                    "lastTransitionTime": now(),
                }
                obj["status"] = {**obj.get("status", {}), "conditions": [*others, condition]}

            if preconditions.get("uid") in {None, stored.obj["metadata"]["uid"]}:
                self._api.modify(resource, key, disrupted)
        self._api.delete(
            resource,
            key,
            DeleteOptions(
                grace=options.get("gracePeriodSeconds"),
                policy=options.get("propagationPolicy"),
                uid=preconditions.get("uid"),
                dry_run=dry,
            ),
        )
        return ApiAnswer(encode(success(code=201)), 201)

    def _bind(self, target: Target, call: Call) -> ApiAnswer:
        resource, key = target.resource, self._handlers.key(target)
        wanted = codec.read_object(resource, call.body, call.content_type, "Binding")
        clean, _ = codec.decode_builtin(resource, wanted, type_name="V1Binding", kind="Binding", version="v1")
        node = dig(clean, "target", "name")
        if not node:
            raise invalid("", "Binding", target.name, [required("target.name")])
        obj = self._api.get(resource, key).obj
        # The pod that was chosen may have been replaced by another one of this name.
        for field, what in (("uid", "UID"), ("resourceVersion", "resource version")):
            if (given := dig(clean, "metadata", field)) and given != obj["metadata"][field]:
                text = f"Precondition failed: {what} in precondition: {given}, {what} in object meta: "
                raise conflict("", "pods/binding", target.name, text + obj["metadata"][field])
        if dig(obj, "spec", "schedulingGates"):
            text = f"pod {target.name} has non-empty .spec.schedulingGates"
            raise conflict("", "pods/binding", target.name, text)
        if obj["metadata"].get("deletionTimestamp"):
            text = f"pod {target.name} is being deleted, cannot be assigned to a host"
            raise conflict("", "pods/binding", target.name, text)
        if dig(obj, "spec", "nodeName"):
            text = f'pod {target.name} is already assigned to node "{obj["spec"]["nodeName"]}"'
            raise conflict("", "pods/binding", target.name, text)

        def bind(pod: Obj) -> None:
            pod["spec"] = {**pod["spec"], "nodeName": node}
            others = [c for c in dig(pod, "status", "conditions") or [] if c.get("type") != "PodScheduled"]
            condition = {"type": "PodScheduled", "status": "True", "lastProbeTime": None, "lastTransitionTime": now()}
            pod["status"] = {**pod.get("status", {}), "conditions": [*others, condition]}

        if not request.dry_run(call.query):
            self._api.modify(resource, key, bind)
        return ApiAnswer(encode(success(code=201)), 201)

    # Logs

    async def logs(
        self, target: Target, call: Call, http: web.BaseRequest, session: aiohttp.ClientSession
    ) -> web.StreamResponse:
        """Forward the log from the kubelet of the pod's node.

        Raises:
            ApiError: 400 when no log exists yet, 404, 500 when the kubelet cannot be reached.
        """
        if call.method != "GET":
            raise method_not_allowed()
        pod = self._api.get(target.resource, self._handlers.key(target)).obj
        container = _container(pod, call.query.get("container", ""))
        node = dig(pod, "spec", "nodeName")
        if not node:
            return web.Response(status=200)  # like the real server, for a pod that waits to be scheduled
        url = self._kubelet(node) + f"/containerLogs/{target.namespace}/{target.name}/{container}"
        options = {k: call.query[k] for k in _LOG_OPTIONS if k in call.query}
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            async with session.get(url, params=options, headers=headers) as answer:
                if answer.status != 200:
                    text = (await answer.text()).strip()
                    reason = {400: "BadRequest", 404: "NotFound"}.get(answer.status, "InternalError")
                    raise ApiError(answer.status, reason, text or f"the kubelet of {node} answered {answer.status}")
                response = web.StreamResponse(headers={"Content-Type": "text/plain"})
                await response.prepare(http)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            raise ApiError(500, "InternalError", f"Internal error occurred: Get {url!r}: {error}") from error

    def _kubelet(self, node: str) -> str:
        found = self._api.find(self._api.registry.must("", "nodes"), ("", node))
        status = found.obj.get("status") or {} if found else {}
        port = dig(status, "daemonEndpoints", "kubeletEndpoint", "Port")
        address = next((a["address"] for a in status.get("addresses") or () if a.get("type") == "InternalIP"), None)
        if not port or not address:
            text = f"Internal error occurred: no address or port of the kubelet of node {node} is known"
            raise ApiError(500, "InternalError", text)
        return f"http://{address}:{port}"


def _steps(path: str) -> list[str]:
    return path.lstrip(".").split(".")


def _container(pod: Obj, requested: str) -> str:
    spec, name = pod["spec"], pod["metadata"]["name"]
    first = [c["name"] for c in spec.get("containers", ())]
    others = [c["name"] for c in (*spec.get("initContainers", ()), *spec.get("ephemeralContainers", ()))]
    if requested:
        if requested not in first + others:
            raise bad_request(f"container {requested} is not valid for pod {name}")
        return requested
    if len(first) == 1:
        return str(first[0])
    text = f"a container name must be specified for pod {name}, choose one of: [{' '.join(first)}]"
    if others:
        text += f" or one of the init containers: [{' '.join(others)}]"
    raise bad_request(text)
