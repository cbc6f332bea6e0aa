"""Run as a program, with nothing but the standard library: what the CUDA driver says, as JSON. Makes no context."""

import ctypes
import json


def ask() -> dict[str, object]:
    """`cuda`: the newest version that the driver serves, 1000 × major + 10 × minor; or `error`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": str(error)}

    def call(name: str, *arguments: object) -> None:
        code = getattr(driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            driver.cuGetErrorName(code, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or str(code).encode()).decode()}")

    try:
        call("cuInit", ctypes.c_uint(0))
        version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        call("cuDriverGetVersion", ctypes.byref(version))
        call("cuDeviceGetCount", ctypes.byref(count))
        devices = []
        for index in range(count.value):
            name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
            call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
            call("cuDeviceGetName", name, ctypes.c_int(len(name)), device)
            call("cuDeviceGetPCIBusId", bus, ctypes.c_int(len(bus)), device)
            devices.append({"name": name.value.decode(errors="replace"), "bus": bus.value.decode()})
        return {"cuda": version.value, "devices": devices}
    except (OSError, AttributeError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(ask()))
