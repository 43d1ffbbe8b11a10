// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package inf is what Kubernetes' quantities calculate with, in place of the module of
// the same name (go.mod replaces it). It has the part of that module's API which
// upstream uses, and one difference: a number has at most [MaxDigits] digits before
// and behind the point.
//
// Upstream computes with exponents as they are written. A quantity of 1e300000000 is
// twelve bytes in a Pod, and a number of a hundred megabytes as soon as it is compared:
// minutes of processor time that nothing can stop, in the API server, the scheduler,
// the controllers and in CEL expressions. It happens while bodies are decoded too,
// before any admission, and nothing in between can be put there.
package inf

import (
	"math/big"
	"strings"
)

// MaxDigits bounds both the scale of a number and the digits it is written with. The
// largest quantity that means anything, an exbibyte in nanounits, has 28.
const MaxDigits = 1000

// Scale is the number of digits behind the decimal point. A negative one stands for
// zeros in front of it.
type Scale int32

func (s Scale) bounded() Scale { return min(max(s, -MaxDigits), MaxDigits) }

// Dec is the decimal number unscaled / 10**scale. The zero value is 0. Methods that
// set z return it; operands may be z itself.
type Dec struct {
	unscaled big.Int
	scale    Scale
}

// Rounder says what becomes of digits that are cut off.
type Rounder bool

const (
	// RoundDown rounds towards zero.
	RoundDown Rounder = false
	// RoundUp rounds away from zero.
	RoundUp Rounder = true
)

// NewDec returns unscaled / 10**scale.
func NewDec(unscaled int64, scale Scale) *Dec {
	return new(Dec).SetUnscaled(unscaled).SetScale(scale)
}

// Scale returns x's scale.
func (x *Dec) Scale() Scale { return x.scale }

// Unscaled returns x's digits, and whether they fit.
func (x *Dec) Unscaled() (u int64, ok bool) { return x.unscaled.Int64(), x.unscaled.IsInt64() }

// UnscaledBig returns x's digits. They are x's own: a change of them changes x.
func (x *Dec) UnscaledBig() *big.Int { return &x.unscaled }

// SetScale moves z's decimal point, as far as MaxDigits.
func (z *Dec) SetScale(scale Scale) *Dec {
	z.scale = scale.bounded()
	return z
}

// SetUnscaled replaces z's digits.
func (z *Dec) SetUnscaled(unscaled int64) *Dec {
	z.unscaled.SetInt64(unscaled)
	return z
}

// SetUnscaledBig replaces z's digits by a copy.
func (z *Dec) SetUnscaledBig(unscaled *big.Int) *Dec {
	z.unscaled.Set(unscaled)
	return z
}

// Set makes z a copy of x.
func (z *Dec) Set(x *Dec) *Dec { return z.SetUnscaledBig(&x.unscaled).SetScale(x.scale) }

// Sign returns -1, 0 or 1.
func (x *Dec) Sign() int { return x.unscaled.Sign() }

// Neg sets z to -x.
func (z *Dec) Neg(x *Dec) *Dec {
	z.unscaled.Neg(&x.unscaled)
	return z.SetScale(x.scale)
}

// Cmp returns -1, 0 or 1 as x is less than y, equal, or greater.
func (x *Dec) Cmp(y *Dec) int {
	a, b, _ := aligned(x, y)
	return a.Cmp(b)
}

// Add sets z to x + y, with the greater of their scales.
func (z *Dec) Add(x, y *Dec) *Dec {
	a, b, s := aligned(x, y)
	z.unscaled.Add(a, b)
	return z.SetScale(s)
}

// Sub sets z to x - y, with the greater of their scales.
func (z *Dec) Sub(x, y *Dec) *Dec {
	a, b, s := aligned(x, y)
	z.unscaled.Sub(a, b)
	return z.SetScale(s)
}

// Mul sets z to x * y, with the sum of their scales.
func (z *Dec) Mul(x, y *Dec) *Dec {
	s := x.scale + y.scale
	z.unscaled.Mul(&x.unscaled, &y.unscaled)
	return z.SetScale(s)
}

// Round sets z to x with the given scale.
func (z *Dec) Round(x *Dec, scale Scale, r Rounder) *Dec {
	scale = scale.bounded()
	if scale >= x.scale {
		z.unscaled.Mul(&x.unscaled, power(scale-x.scale))
		return z.SetScale(scale)
	}
	sign := int64(x.Sign())
	var rest big.Int
	z.unscaled.QuoRem(&x.unscaled, power(x.scale-scale), &rest)
	if r == RoundUp && rest.Sign() != 0 {
		z.unscaled.Add(&z.unscaled, big.NewInt(sign))
	}
	return z.SetScale(scale)
}

// SetString sets z to the number that s is: a sign if there is one, digits, and at
// most one point among them. If s is anything else, or longer than MaxDigits, ok is
// false and z is undefined.
func (z *Dec) SetString(s string) (_ *Dec, ok bool) {
	whole, fraction, _ := strings.Cut(s, ".")
	digits := whole + fraction
	if len(digits) > MaxDigits {
		return nil, false
	}
	unsigned := strings.TrimLeft(digits, "+-")
	if unsigned == "" || strings.Trim(unsigned, "0123456789") != "" || len(digits)-len(unsigned) > 1 {
		return nil, false
	}
	if _, ok := z.unscaled.SetString(digits, 10); !ok {
		return nil, false
	}
	return z.SetScale(Scale(len(fraction))), true
}

// String returns x without an exponent.
func (x *Dec) String() string {
	digits := x.unscaled.String()
	if x.scale <= 0 {
		if x.Sign() == 0 {
			return digits
		}
		return digits + strings.Repeat("0", int(-x.scale))
	}
	sign := ""
	if x.Sign() < 0 {
		sign, digits = "-", digits[1:]
	}
	if missing := int(x.scale) + 1 - len(digits); missing > 0 {
		digits = strings.Repeat("0", missing) + digits
	}
	point := len(digits) - int(x.scale)
	return sign + digits[:point] + "." + digits[point:]
}

// aligned returns the digits of x and y at the greater of their scales, which are not
// to be changed.
func aligned(x, y *Dec) (a, b *big.Int, scale Scale) {
	a, b = &x.unscaled, &y.unscaled
	switch d := x.scale - y.scale; {
	case d < 0:
		a = new(big.Int).Mul(a, power(-d))
	case d > 0:
		b = new(big.Int).Mul(b, power(d))
	}
	return a, b, max(x.scale, y.scale)
}

// power returns 10**n, of which none is larger than 2*MaxDigits.
func power(n Scale) *big.Int {
	return new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(n)), nil)
}
