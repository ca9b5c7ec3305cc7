"""Converts a request of each verb over HTTP to an operation of `rest`, and its result to bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay_cluster.apiserver import codec, request, selectors
from backstay_cluster.apiserver.custom import CustomType
from backstay_cluster.apiserver.errors import (
    ApiError,
    WrongTypeError,
    bad_request,
    invalid,
    invalid_value,
    method_not_allowed,
    too_large_resource_version,
    unsupported_media_type,
)
from backstay_cluster.apiserver.objects import Obj, copy, encode
from backstay_cluster.apiserver.patch import json_patch, merge, strategic_merge
from backstay_cluster.apiserver.protobuf import PROTOBUF, decode_protobuf
from backstay_cluster.apiserver.request import Target
from backstay_cluster.apiserver.resources import Resource
from backstay_cluster.apiserver.rest import Api, DeleteOptions, Page
from backstay_cluster.apiserver.store import Stored
from backstay_cluster.apiserver.tables import table, table_event

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


@dataclass
class Call:
    """One request, parsed."""

    method: str
    path: str
    query: Mapping[str, str]
    accept: str = ""
    content_type: str = ""
    body: bytes = b""


@dataclass
class ApiAnswer:
    """One response."""

    body: bytes
    status: int = 200
    warnings: list[str] = field(default_factory=list)
    content_type: str = "application/json"


class Handlers:
    """Answers requests for objects. `custom` returns the types that definitions added."""

    def __init__(self, api: Api, custom: Callable[[Resource], CustomType]) -> None:
        self.api = api
        self.custom = custom

    # Reading

    def get(self, target: Target, call: Call) -> ApiAnswer:
        """Returns one object."""
        form = request.accepted(call.accept)
        requested = request.version_option(call.query)
        if requested and requested > self.api.store.version:
            raise too_large_resource_version(requested, self.api.store.version)
        stored = self.api.get(target.resource, self.key(target))
        return ApiAnswer(self.render(target.resource, stored, form, call.query))

    def matcher(self, target: Target, query: Mapping[str, str]) -> selectors.Matcher | None:
        """Returns the selection of a list, a watch or a delete of a collection."""
        resource = target.resource
        selectable = self.custom(resource).selectable if resource.custom else ()
        fields = query.get("fieldSelector", "")
        if target.name:
            fields = ",".join(filter(None, (fields, f"metadata.name={target.name}")))
        return selectors.matcher(resource.storage, query.get("labelSelector", ""), fields, selectable)

    def collection(self, target: Target, call: Call) -> ApiAnswer:
        """Returns the selected objects."""
        form, query = request.accepted(call.accept), call.query
        limit = request.number(query, "limit") or 0
        requested = request.version_option(query)
        exact = query.get("resourceVersionMatch") == "Exact"
        if requested and requested > self.api.store.version:
            raise too_large_resource_version(requested, self.api.store.version)
        if exact and requested and requested != self.api.store.version:
            raise ApiError(410, "Expired", "The resourceVersion for the provided list is too old.")
        page = self.api.select(
            target.resource,
            target.namespace,
            self.matcher(target, query),
            limit=limit,
            token=query.get("continue", ""),
            selector=query.get("labelSelector", "") + query.get("fieldSelector", ""),
        )
        return ApiAnswer(self.render_list(target.resource, page, form, query))

    def render(self, resource: Resource, stored: Stored, form: request.Form, query: Mapping[str, str]) -> bytes:
        """Returns one object in the requested form."""
        if form == "object":
            return codec.full_bytes(resource, stored)
        if form == "metadata":
            return encode(_partial(stored))
        columns = self.custom(resource).columns if resource.custom else None
        return encode(table(resource, [stored], {"resourceVersion": str(stored.version)}, columns, _include(query)))

    def render_event(
        self, resource: Resource, form: request.Form, query: Mapping[str, str]
    ) -> Callable[[Stored], bytes]:
        """Returns the function with which a watch writes objects of the resource."""
        if form == "object":
            head = codec.head(resource)
            return lambda stored: head + stored.body[1:]
        if form == "metadata":
            return lambda stored: encode(_partial(stored))
        columns = self.custom(resource).columns if resource.custom else None
        return table_event(resource, columns, _include(query))

    def render_list(self, resource: Resource, page: Page, form: request.Form, query: Mapping[str, str]) -> bytes:
        """Returns a list in the requested form."""
        data: Obj = {"resourceVersion": str(page.version)}
        if page.token:
            data["continue"] = page.token
            if page.remaining is not None:
                data["remainingItemCount"] = page.remaining
        if form == "table":
            columns = self.custom(resource).columns if resource.custom else None
            return encode(table(resource, page.items, data, columns, _include(query)))
        if form == "metadata":
            items = [_partial(s) for s in page.items]
            kind = "PartialObjectMetadataList"
            return encode({"kind": kind, "apiVersion": "meta.k8s.io/v1", "metadata": data, "items": items})
        head = codec.head(resource) if resource.custom else b"{"  # items of built-in lists have no kind
        items_bytes = b",".join([head + s.body[1:] for s in page.items])
        start = encode({"kind": resource.list_kind, "apiVersion": resource.group_version, "metadata": data})
        return start[:-1] + b',"items":[' + items_bytes + b"]}"

    @staticmethod
    def key(target: Target) -> tuple[str, str]:
        """Returns the object's key in the store."""
        return target.namespace or "", target.name

    # Writing

    def create(self, target: Target, call: Call) -> ApiAnswer:
        """Create an object."""
        resource = target.resource
        obj = codec.read_object(resource, call.body, call.content_type)
        clean, warnings = self._decode(resource, obj, call)
        stored = self.api.create(resource, target.namespace or "", clean, dry_run=request.dry_run(call.query))
        return ApiAnswer(self._written(resource, stored, call), 201, warnings)

    def replace(self, target: Target, call: Call) -> ApiAnswer:
        """Replace an object, or its status."""
        resource = target.resource
        obj = codec.read_object(resource, call.body, call.content_type)
        clean, warnings = self._decode(resource, obj, call)
        existed = self.api.find(resource, self.key(target)) is not None
        stored = self.api.update(
            resource, self.key(target), clean, part=_part(target), dry_run=request.dry_run(call.query)
        )
        return ApiAnswer(self._written(resource, stored, call), 200 if existed else 201, warnings)

    def patch(self, target: Target, call: Call) -> ApiAnswer:
        """Change an object, or its status."""
        resource, key = target.resource, self.key(target)
        self.check_patch_type(resource, call.content_type)
        change = self.read_patch(call)
        current = self.api.get(resource, key)
        before = codec.full(resource, current.obj)
        patched = self.apply(resource, before, change, call.content_type)
        try:
            clean, warnings = self._decode(resource, patched, call)
        except WrongTypeError as error:
            raise invalid("", "", "", [invalid_value("patch", change, str(error.cause))]) from None
        stored = self.api.update(resource, key, clean, part=_part(target), dry_run=request.dry_run(call.query))
        return ApiAnswer(self._written(resource, stored, call), 200, warnings)

    @staticmethod
    def read_patch(call: Call) -> Any:
        """Returns the JSON of a patch.

        Raises:
            ApiError: 400, the request is malformed.
        """
        try:
            return codec.parse_json(call.body)
        except ValueError as error:
            raise bad_request(f"error decoding patch: {error}") from None

    @staticmethod
    def check_patch_type(resource: Resource, content_type: str) -> None:
        """Refuse the kinds of patches that are not supported.

        Raises:
            ApiError: 415.
        """
        if content_type == APPLY_PATCH:
            raise unsupported_media_type(
                "server-side apply is not served by this embedded API server: "
                "use client-side apply (kubectl apply --server-side=false), or a merge patch"
            )
        if resource.custom and content_type not in {JSON_PATCH, MERGE_PATCH}:
            raise unsupported_media_type(
                "the body of the request was in an unknown format - accepted media types include: "
                f"{JSON_PATCH}, {MERGE_PATCH}, {APPLY_PATCH}"
            )
        if content_type not in {JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH}:
            raise unsupported_media_type("415: Unsupported Media Type", details={})

    @staticmethod
    def apply(resource: Resource, before: Obj, change: Any, content_type: str) -> Obj:
        """Returns the object with a patch applied; the old object is unchanged.

        Raises:
            ApiError: 400, 422.
        """
        if content_type == JSON_PATCH:
            patched = json_patch(before, change)
        elif not isinstance(change, dict):
            raise bad_request("error decoding patch: a JSON object was expected")
        elif content_type == MERGE_PATCH:
            patched = copy(merge(before, change))
        else:
            patched = copy(strategic_merge(resource.type_name, before, change))
        if not isinstance(patched, dict):
            raise bad_request("the patched object is not a JSON object")
        return patched

    def _decode(self, resource: Resource, obj: Obj, call: Call) -> tuple[Obj, list[str]]:
        validation = request.field_validation(call.query)
        if resource.custom:
            clean, unknown = self.custom(resource).decode(obj)
        else:
            clean, unknown = codec.decode_builtin(resource, obj)
        if not unknown or validation == "Ignore":
            return clean, []
        texts = [f'unknown field "{path}"' for path in unknown]
        if validation == "Strict":
            kind = obj.get("kind") or resource.kind
            raise bad_request(
                f'{kind} in version "{resource.version}" cannot be handled as a {kind}: '
                f"strict decoding error: {', '.join(texts)}"
            )
        return clean, texts

    def _written(self, resource: Resource, stored: Stored, call: Call) -> bytes:
        return self.render(resource, stored, request.accepted(call.accept), call.query)

    # Deleting

    def delete(self, target: Target, call: Call) -> ApiAnswer:
        """Delete an object, or mark it as being deleted."""
        resource, key = target.resource, self.key(target)
        stored, gone = self.api.delete(resource, key, self.delete_options(call))
        if gone and not self.api.strategy(resource).returns_deleted:
            details = {"name": target.name, "group": resource.group, "kind": resource.plural}
            details["uid"] = stored.obj["metadata"]["uid"]
            return ApiAnswer(encode(success({k: v for k, v in details.items() if v})))
        return ApiAnswer(self.render(resource, stored, request.accepted(call.accept), call.query))

    def delete_collection(self, target: Target, call: Call) -> ApiAnswer:
        """Delete or mark all selected objects; the answer lists them in their previous state."""
        resource = target.resource
        options = self.delete_options(call)
        page = self.api.select(resource, target.namespace, self.matcher(target, call.query))
        for stored in page.items:
            if self.api.find(resource, stored.key) is not None:  # an earlier deletion may have deleted it too
                self.api.delete(resource, stored.key, options)
        return ApiAnswer(self.render_list(resource, page, request.accepted(call.accept), call.query))

    @staticmethod
    def delete_options(call: Call) -> DeleteOptions:
        """Returns the options of a delete, from the body and the query.

        Raises:
            ApiError: 400, 422.
        """
        body: Any = {}
        if call.body.strip() and call.content_type == PROTOBUF:
            body = decode_protobuf(call.body, "DeleteOptions")
        elif call.body.strip():
            try:
                body = codec.parse_json(call.body)
            except ValueError as error:
                raise bad_request(f"couldn't get version/kind; {error}") from None
            if not isinstance(body, dict):
                raise bad_request("json: cannot unmarshal array into Go value of type v1.DeleteOptions")
        query = call.query
        grace = request.number(query, "gracePeriodSeconds")
        if grace is None:
            grace = body.get("gracePeriodSeconds")
        if grace is not None and (not isinstance(grace, int) or isinstance(grace, bool)):
            raise bad_request("gracePeriodSeconds must be an integer number of seconds")
        # Clients differ: kubectl sends a body, and curl mostly a query. An old field means the same as the new one.
        policy = query.get("propagationPolicy") or body.get("propagationPolicy")
        if policy is None:
            orphan = (
                query["orphanDependents"] == "true" if "orphanDependents" in query else body.get("orphanDependents")
            )
            policy = None if orphan is None else "Orphan" if orphan else "Background"
        if policy not in (None, "Orphan", "Background", "Foreground"):
            raise ApiError(
                422,
                "Invalid",
                f'DeleteOptions.meta.k8s.io "" is invalid: propagationPolicy: Unsupported value: "{policy}": '
                'supported values: "Background", "Foreground", "Orphan"',
                details={"group": "meta.k8s.io", "kind": "DeleteOptions"},
            )
        preconditions = body.get("preconditions") or {}
        if not isinstance(preconditions, dict):
            raise bad_request("json: cannot unmarshal value into Go struct field DeleteOptions.preconditions")
        return DeleteOptions(
            grace=grace,
            policy=policy,
            uid=preconditions.get("uid"),
            version=preconditions.get("resourceVersion"),
            dry_run=request.dry_run(query, body),
        )

    def dispatch(self, target: Target, call: Call) -> ApiAnswer:
        """Answer a request for objects (watches and other subresources than status are served elsewhere).

        Raises:
            ApiError: the error of the request.
        """
        if call.method == "GET":
            return self.get(target, call) if target.name else self.collection(target, call)
        if call.method == "POST" and not target.name:
            if target.resource.namespaced and target.namespace is None:
                raise method_not_allowed()
            return self.create(target, call)
        if call.method == "PUT" and target.name:
            return self.replace(target, call)
        if call.method == "PATCH" and target.name:
            return self.patch(target, call)
        if call.method == "DELETE" and not target.subresource:
            if target.name:
                return self.delete(target, call)
            if target.namespace is not None or not target.resource.namespaced:
                return self.delete_collection(target, call)
        raise method_not_allowed()


def success(details: Obj | None = None, *, code: int | None = None) -> Obj:
    """Returns a `Status` that reports success."""
    status: Obj = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if details:
        status["details"] = details
    if code:
        status["code"] = code
    return status


def _part(target: Target) -> str:
    return "status" if target.subresource == "status" else ""


def _include(query: Mapping[str, str]) -> str:
    return query.get("includeObject", "") or "Metadata"


def _partial(stored: Stored) -> Obj:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": stored.obj["metadata"]}
