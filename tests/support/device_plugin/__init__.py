# SPDX-License-Identifier: Apache-2.0
"""A stand-in for NVIDIA's device plugin: it offers GPUs that do not exist to a real kubelet.

It uses Kubernetes' device plugin API v1beta1. A kubelet finds it by its socket in `plugins_registry`, below
the kubelet's root folder. NVIDIA's plugin registers at /var/lib/kubelet/device-plugins/kubelet.sock instead.
All kubelets of one machine have that path, so it reaches only the one that started last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

_HERE = Path(__file__).parent.relative_to(Path(__file__).parents[3])
_device, _device_services = grpc.protos_and_services(str(_HERE / "deviceplugin.proto"))
_registry, _registry_services = grpc.protos_and_services(str(_HERE / "registration.proto"))

RESOURCE = "nvidia.com/gpu"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"  # NVIDIA's container runtime injects the devices that it names
VERSION = "v1beta1"


class DevicePlugin:
    """The GPUs of one node. A kubelet knows them from `__enter__` until `__exit__`.

    Args:
        registry: the folder `plugins_registry` of the node's kubelet.
        gpus: the ids of the GPUs.
    """

    def __init__(self, registry: Path, gpus: Sequence[str]):
        self._socket = registry / "gpu.sock"
        self._healthy = dict.fromkeys(gpus, True)
        self._changed = threading.Condition()
        self.failures = 0  # so many of the next allocations fail
        # A kubelet has one ListAndWatch open, and calls the other methods beside it.
        self._server = grpc.server(ThreadPoolExecutor(4))
        _device_services.add_DevicePluginServicer_to_server(self, self._server)
        _registry_services.add_RegistrationServicer_to_server(self, self._server)

    def set_health(self, gpu: str, healthy: bool) -> None:
        """Report a GPU as healthy or not, as NVIDIA's plugin does after a critical XID error."""
        with self._changed:
            self._healthy[gpu] = healthy
            self._changed.notify_all()

    def __enter__(self) -> DevicePlugin:
        self._socket.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{self._socket}")
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Withdraw the GPUs. The kubelet reports 0 of them, and removes the resource after five minutes."""
        with self._changed:
            self._healthy.clear()
            self._changed.notify_all()
        self._server.stop(grace=1).wait()
        self._socket.unlink(missing_ok=True)

    # --- pluginregistration.Registration

    def GetInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        return _registry.PluginInfo(type="DevicePlugin", name=RESOURCE, supported_versions=[VERSION])

    def NotifyRegistrationStatus(self, request: Any, context: grpc.ServicerContext) -> Any:
        return _registry.RegistrationStatusResponse()

    # --- v1beta1.DevicePlugin

    def GetDevicePluginOptions(self, request: Any, context: grpc.ServicerContext) -> Any:
        return _device.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(self._wake)  # the kubelet is gone
        sent: dict[str, bool] = {}
        while context.is_active():
            with self._changed:
                while context.is_active() and sent == self._healthy:
                    self._changed.wait()
                sent = dict(self._healthy)
            devices = [
                _device.Device(ID=gpu, health="Healthy" if healthy else "Unhealthy")
                for gpu, healthy in sent.items()
            ]
            yield _device.ListAndWatchResponse(devices=devices)
            if not sent:
                return

    def Allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.failures:
            self.failures -= 1
            context.abort(grpc.StatusCode.INTERNAL, "the GPU's driver does not answer")
        return _device.AllocateResponse(
            container_responses=[
                _device.ContainerAllocateResponse(envs={VISIBLE: ",".join(asked.devices_ids)})
                for asked in request.container_requests
            ]
        )

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
