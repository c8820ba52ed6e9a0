// Operations whose NaN and zero rules differ from CUDA's own, and complex numbers.

// NaN in either operand gives NaN, as in NumPy; fmax and fmin would drop it.
template <class T>
__device__ __forceinline__ T maximum(T a, T b) { return (a > b) | (a != a) ? a : b; }
template <class T>
__device__ __forceinline__ T minimum(T a, T b) { return (a < b) | (a != a) ? a : b; }
template <class T>
__device__ __forceinline__ T sign(T a) { return a == a ? (T)(a > 0) - (T)(a < 0) : a; }
template <class T>
__device__ __forceinline__ T modulo(T a, T b) {  // has the sign of b
    const T rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <class T>
__device__ __forceinline__ bool finite(T a) { return a - a == 0; }
template <class T>
__device__ __forceinline__ T magnitude(T a) { return fabs(a); }

struct Complex {
    W real, imag;
};

__device__ __forceinline__ Complex complex_of(W x) { return {x, 0}; }
__device__ __forceinline__ Complex complex_of(Complex x) { return x; }
__device__ __forceinline__ Complex operator-(Complex a) { return {-a.real, -a.imag}; }
__device__ __forceinline__ Complex operator+(Complex a, Complex b) { return {a.real + b.real, a.imag + b.imag}; }
__device__ __forceinline__ Complex operator+(Complex a, W b) { return {a.real + b, a.imag}; }
__device__ __forceinline__ Complex operator+(W a, Complex b) { return {a + b.real, b.imag}; }
__device__ __forceinline__ Complex operator-(Complex a, Complex b) { return {a.real - b.real, a.imag - b.imag}; }
__device__ __forceinline__ Complex operator-(Complex a, W b) { return {a.real - b, a.imag}; }
__device__ __forceinline__ Complex operator-(W a, Complex b) { return {a - b.real, -b.imag}; }
__device__ __forceinline__ Complex operator*(Complex a, Complex b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}
__device__ __forceinline__ Complex operator*(Complex a, W b) { return {a.real * b, a.imag * b}; }
__device__ __forceinline__ Complex operator*(W a, Complex b) { return {a * b.real, a * b.imag}; }
__device__ __forceinline__ Complex operator/(Complex a, W b) { return {a.real / b, a.imag / b}; }
__device__ __forceinline__ Complex operator/(Complex a, Complex b) {  // Smith's algorithm, in which no square overflows
    if (fabs(b.real) >= fabs(b.imag)) {
        const W ratio = b.imag / b.real, scale = b.real + b.imag * ratio;
        return {(a.real + a.imag * ratio) / scale, (a.imag - a.real * ratio) / scale};
    }
    const W ratio = b.real / b.imag, scale = b.real * ratio + b.imag;
    return {(a.real * ratio + a.imag) / scale, (a.imag * ratio - a.real) / scale};
}
__device__ __forceinline__ Complex operator/(W a, Complex b) { return complex_of(a) / b; }
__device__ __forceinline__ bool operator==(Complex a, Complex b) { return a.real == b.real && a.imag == b.imag; }
__device__ __forceinline__ bool operator==(Complex a, W b) { return a.real == b && a.imag == 0; }
__device__ __forceinline__ bool operator!=(Complex a, Complex b) { return !(a == b); }
__device__ __forceinline__ bool operator!=(Complex a, W b) { return !(a == b); }
__device__ __forceinline__ W magnitude(Complex a) { return hypot(a.real, a.imag); }
__device__ __forceinline__ Complex conjugate(Complex a) { return {a.real, -a.imag}; }
__device__ __forceinline__ W conjugate(W a) { return a; }
__device__ __forceinline__ W real_part(Complex a) { return a.real; }
__device__ __forceinline__ W real_part(W a) { return a; }
__device__ __forceinline__ W imaginary_part(Complex a) { return a.imag; }
__device__ __forceinline__ W imaginary_part(W) { return 0; }
__device__ __forceinline__ W square_magnitude(Complex a) { return a.real * a.real + a.imag * a.imag; }
__device__ __forceinline__ W square_magnitude(W a) { return a * a; }
__device__ __forceinline__ bool finite(Complex a) { return finite(a.real) && finite(a.imag); }

// The storage format of complex numbers.
template <class T>
struct Pair {
    T real, imag;
};
template <class T>
__device__ __forceinline__ Complex widen(Pair<T> x) { return {(W)x.real, (W)x.imag}; }
template <class T>
__device__ __forceinline__ void narrow(Complex x, Pair<T>& to) { to = {(T)x.real, (T)x.imag}; }
template <class T>
__device__ __forceinline__ void narrow(W x, Pair<T>& to) { to = {(T)x, (T)0}; }
