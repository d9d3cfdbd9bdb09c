// One CUDA device whose work is done at once, for a torch without CUDA: see second_device.py.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct Guard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
namespace at {
struct Hooks final : CUDAHooksInterface {
  Hooks(CUDAHooksArgs) {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
