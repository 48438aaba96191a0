// Matrix products of a warp with the names of nvcuda::wmma. (Fragments of 4 bits and of 1 bit are not emulated.)
//
// A lane's elements are in pairs that are adjacent in memory, in blocks of 8 x 8: lane 4g + t has places 2t and 2t + 1
// of line g of each block. A line is a row, or with col_major a column. Loads have the access pattern of this layout.
#pragma once

#include "ptx.h"

namespace nvcuda::wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
namespace precision {
struct tf32 {};
}
enum layout_t { mem_row_major, mem_col_major };

namespace cuda_cpu_wmma {
template <class T> struct Stored { using type = T; };
template <> struct Stored<precision::tf32> { using type = float; };
template <class Use, unsigned M, unsigned N, unsigned K> struct Shape {
    static constexpr unsigned rows = std::is_same_v<Use, matrix_b> ? K : M;
    static constexpr unsigned columns = std::is_same_v<Use, matrix_a> ? K : N;
};
}  // namespace cuda_cpu_wmma

template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
    using element_type = typename cuda_cpu_wmma::Stored<T>::type;
    using Shape = cuda_cpu_wmma::Shape<Use, M, N, K>;
    static constexpr bool is_transposed = std::is_same_v<Layout, col_major>;
    static constexpr unsigned lines = is_transposed ? Shape::columns : Shape::rows;
    static constexpr unsigned places = is_transposed ? Shape::rows : Shape::columns;
    static constexpr int num_elements = lines * places / 32;
    alignas(2 * sizeof(element_type)) element_type x[num_elements];   // copied in pairs

    struct Position { unsigned line, place; };
    static Position position(unsigned element, unsigned lane) {
        if (lines % 8 != 0 || places % 8 != 0) {
            const unsigned number = lane * num_elements + element;
            return {number / places, number % places};
        }
        const unsigned part = element / 2;
        return {part % (lines / 8) * 8 + lane / 4, part / (lines / 8) * 8 + 2 * (lane % 4) + element % 2};
    }
};

template <class U, int M, int N, int K, class T, class L>
void fill_fragment(fragment<U, M, N, K, T, L>& f, typename fragment<U, M, N, K, T, L>::element_type value) {
    std::fill_n(f.x, f.num_elements, value);
}

namespace cuda_cpu_wmma {
// Two elements, which are one access.
template <class T> struct alignas(2 * sizeof(T)) Pair { T x[2]; };
template <class T> Pair<T>* as_pair(T* x) { return reinterpret_cast<Pair<T>*>(x); }
template <class T> const Pair<T>* as_pair(const T* x) { return reinterpret_cast<const Pair<T>*>(x); }

// Copies a lane's fragment from or to memory. is_along: the fragment's lines are contiguous in memory.
template <bool LOADS, class Fragment, class Element>
void copy_fragment(const char* name, Fragment& f, Element* matrix, unsigned stride, bool is_along) {
    using namespace cuda_cpu;
    require_warps(name);
    if (!aligned(matrix, 32)) reject(name, "with an address that is not a multiple of 32");
    if (stride * sizeof(Element) % 16 != 0)
        reject(name, "with a stride of ", stride, " elements; expected a multiple of ", 16 / sizeof(Element));
    const auto copy = [](auto* memory, auto* element) {
        if constexpr (LOADS) *element = *memory;
        else *memory = *element;
    };
    const bool in_pairs = is_along && Fragment::num_elements % 2 == 0 && Fragment::places % 8 == 0;
    for (unsigned e = 0; e < Fragment::num_elements; e += in_pairs ? 2 : 1) {
        const auto at = Fragment::position(e, lane());
        Element* const memory = matrix + (is_along ? at.line * stride + at.place : at.place * stride + at.line);
        if (in_pairs) copy(cuda_cpu_wmma::as_pair(memory), cuda_cpu_wmma::as_pair(f.x + e));
        else copy(memory, f.x + e);
    }
}

// Numbers as a product computes with them. tf32 ignores the lower 13 bits.
template <class T> using Number = std::conditional_t<std::is_same_v<T, double>, double,
                                                     std::conditional_t<std::is_integral_v<T>, int, float>>;
template <class T, class X> Number<T> number(X x) {
    if constexpr (std::is_same_v<T, precision::tf32>)
        return cuda_cpu::bits<float>(cuda_cpu::bits<unsigned>(x) & 0xffffe000u);
    else return static_cast<Number<T>>(x);
}

// Copies the elements of all lanes' fragments to a matrix of rows, or back.
template <class T, class Fragment, class Value>
CUDA_CPU_NO_TSAN void gather(Value* matrix, Fragment* const* of_lane) {
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned e = 0; e < Fragment::num_elements; e++) {
            const auto at = Fragment::position(e, lane);
            const unsigned row = Fragment::is_transposed ? at.place : at.line;
            const unsigned column = Fragment::is_transposed ? at.line : at.place;
            Value& value = matrix[row * Fragment::Shape::columns + column];
            if constexpr (std::is_const_v<Fragment>) value = number<T>(of_lane[lane]->x[e]);
            else of_lane[lane]->x[e] = static_cast<typename Fragment::element_type>(value);
        }
}
}  // namespace cuda_cpu_wmma

template <class U, int M, int N, int K, class T, class L, class E>
void load_matrix_sync(fragment<U, M, N, K, T, L>& f, const E* from, unsigned stride) {
    cuda_cpu_wmma::copy_fragment<true>("load_matrix_sync", f, from, stride, true);
}
template <int M, int N, int K, class T, class E>
void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, const E* from, unsigned stride, layout_t layout) {
    cuda_cpu_wmma::copy_fragment<true>("load_matrix_sync", f, from, stride, layout == mem_row_major);
}
template <int M, int N, int K, class T>
void store_matrix_sync(T* to, const fragment<accumulator, M, N, K, T>& f, unsigned stride, layout_t layout) {
    cuda_cpu_wmma::copy_fragment<false>("store_matrix_sync", f, to, stride, layout == mem_row_major);
}

// d = a b + c
template <int M, int N, int K, class T, class LA, class LB, class C, class D>
void mma_sync(fragment<accumulator, M, N, K, D>& d, const fragment<matrix_a, M, N, K, T, LA>& a,
              const fragment<matrix_b, M, N, K, T, LB>& b, const fragment<accumulator, M, N, K, C>& c, bool = false) {
    using namespace cuda_cpu;
    using A = fragment<matrix_a, M, N, K, T, LA>;
    using B = fragment<matrix_b, M, N, K, T, LB>;
    using Sum = cuda_cpu_wmma::Number<D>;
    struct Operand {
        fragment<accumulator, M, N, K, D>* d;
        const A* a;
        const B* b;
        const fragment<accumulator, M, N, K, C>* c;
    } mine{&d, &a, &b, &c};
    const bool is_of_volta = std::is_same_v<T, half>, is_of_turing = std::is_integral_v<T>;
    require_capability("wmma::mma_sync", is_of_volta ? 70 : is_of_turing ? 72 : 80);
    full_warp_collective("wmma::mma_sync", &mine, [](void* const* operands, unsigned lanes) {
        require_all_lanes("wmma::mma_sync", lanes);
        watch::tensor_flops(2 * M * N * K);
        Operand of_lane[32];
        for (unsigned lane = 0; lane < 32; lane++) of_lane[lane] = *static_cast<Operand*>(operands[lane]);
        const auto all = [&](auto member) {
            std::array<std::remove_reference_t<decltype(of_lane[0].*member)>, 32> fragments;
            for (unsigned lane = 0; lane < 32; lane++) fragments[lane] = of_lane[lane].*member;
            return fragments;
        };
        cuda_cpu_wmma::Number<T> left[M * K], right[K * N];
        Sum sums[M * N];
        cuda_cpu_wmma::gather<T>(left, all(&Operand::a).data());
        cuda_cpu_wmma::gather<T>(right, all(&Operand::b).data());
        cuda_cpu_wmma::gather<C>(sums, all(&Operand::c).data());
        add_product<M, N, K>(sums, left, right);
        cuda_cpu_wmma::gather<D>(sums, all(&Operand::d).data());
    });
}

// Rounds to the 10 mantissa bits of tf32, ties away from zero.
inline float __float_to_tf32(float x) {
    return std::isfinite(x) ? cuda_cpu::bits<float>((cuda_cpu::bits<unsigned>(x) + 0x1000) & 0xffffe000u) : x;
}
}  // namespace nvcuda::wmma
