// Torch tensors as arguments of bound functions, viewed in place.
//
// A view costs a fraction of a microsecond, where the protocol's Python method costs several: a forward
// passes a thousand of them. Source: DLPack 1.3, `dlpack.h` (DLPackExchangeAPI, DLTensor), whose layouts are
// repeated here because torch's headers are not needed otherwise.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace pdmesh::kernels {

namespace dlpack {

enum class DeviceType : std::int32_t { kCpu = 1 };
enum class TypeCode : std::uint8_t { kInt = 0, kUnsigned = 1, kFloat = 2 };

struct Tensor {
  void* data;
  DeviceType device_type;
  std::int32_t device_id;
  std::int32_t num_dims;
  TypeCode type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

// Fills a view whose shape and strides live as long as the object. Returns 0, or -1 with a Python error set.
using ViewObject = int (*)(void* object, Tensor* view);

// The view function of a type of tensors; null if it has none.
ViewObject find_view_function(PyTypeObject* type);

}  // namespace dlpack

// Borrowed for the length of the call. Strides in elements. A contiguous view is refused for other tensors.
template <class Element, int kDims, bool kContiguous = false>
class TensorView {
 public:
  Element* data() const { return data_; }
  std::size_t shape(std::size_t axis) const { return static_cast<std::size_t>(shape_[axis]); }
  std::int64_t stride(std::size_t axis) const { return strides_[axis]; }
  Element& operator()(std::size_t index) const {
    return data_[static_cast<std::int64_t>(index) * strides_[0]];
  }

  // False if the tensor is of another type or shape.
  bool assign(const dlpack::Tensor& tensor) {
    if (tensor.device_type != dlpack::DeviceType::kCpu || tensor.num_dims != kDims ||
        tensor.type_code != kTypeCode || tensor.type_bits != 8 * sizeof(Element) || tensor.type_lanes != 1) {
      return false;
    }
    data_ = reinterpret_cast<Element*>(static_cast<std::byte*>(tensor.data) + tensor.byte_offset);
    std::copy_n(tensor.shape, kDims, shape_);
    std::copy_n(tensor.strides, kDims, strides_);
    return !kContiguous || is_contiguous();
  }

 private:
  using Value = std::remove_const_t<Element>;
  static constexpr dlpack::TypeCode kTypeCode = std::is_floating_point_v<Value> ? dlpack::TypeCode::kFloat
                                                : std::is_signed_v<Value>       ? dlpack::TypeCode::kInt
                                                                                : dlpack::TypeCode::kUnsigned;

  // A dimension of extent one may carry any stride, and so may all of an empty tensor.
  bool is_contiguous() const {
    std::int64_t expected = 1;
    for (int axis = kDims - 1; axis >= 0; --axis) {
      if (shape_[axis] == 0) return true;
      if (shape_[axis] != 1 && strides_[axis] != expected) return false;
      expected *= shape_[axis];
    }
    return true;
  }

  Element* data_ = nullptr;
  std::int64_t shape_[kDims] = {};
  std::int64_t strides_[kDims] = {};
};

}  // namespace pdmesh::kernels

namespace nanobind::detail {

template <class Element, int kDims, bool kContiguous>
struct type_caster<pdmesh::kernels::TensorView<Element, kDims, kContiguous>> {
  using View = pdmesh::kernels::TensorView<Element, kDims, kContiguous>;
  NB_TYPE_CASTER(View, const_name("torch.Tensor"))

  bool from_python(handle object, std::uint8_t, cleanup_list*) noexcept {
    const auto view_object = pdmesh::kernels::dlpack::find_view_function(Py_TYPE(object.ptr()));
    if (view_object == nullptr) return false;
    pdmesh::kernels::dlpack::Tensor tensor{};
    if (view_object(object.ptr(), &tensor) != 0) {
      PyErr_Clear();
      return false;
    }
    return value.assign(tensor);
  }
};

}  // namespace nanobind::detail
