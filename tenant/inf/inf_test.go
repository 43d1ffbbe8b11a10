// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package inf

import (
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
)

// rat is what a number is worth.
func rat(x *Dec) *big.Rat {
	r := new(big.Rat).SetInt(&x.unscaled)
	if x.scale >= 0 {
		return r.Quo(r, new(big.Rat).SetInt(power(x.scale)))
	}
	return r.Mul(r, new(big.Rat).SetInt(power(-x.scale)))
}

func numbers() []*Dec {
	r := rand.New(rand.NewPCG(1, 2))
	all := []*Dec{new(Dec), NewDec(1, 0), NewDec(-1, 0), NewDec(5, 1), NewDec(-5, 1), NewDec(math.MaxInt64, 9), NewDec(math.MinInt64, -9)}
	for range 40 {
		all = append(all, NewDec(r.Int64N(2e6)-1e6, Scale(r.IntN(24)-12)))
		all = append(all, new(Dec).SetUnscaledBig(new(big.Int).Mul(big.NewInt(r.Int64()), big.NewInt(-r.Int64()))).SetScale(Scale(r.IntN(60)-30)))
	}
	return all
}

// Rational numbers, which are exact, are what everything is compared with.
func TestArithmetic(t *testing.T) {
	for _, x := range numbers() {
		for _, y := range numbers() {
			if got, want := x.Cmp(y), rat(x).Cmp(rat(y)); got != want {
				t.Fatalf("%s and %s compare as %d, want %d", x, y, got, want)
			}
			for name, test := range map[string]struct {
				got   *Dec
				want  *big.Rat
				scale Scale
			}{
				"+": {new(Dec).Add(x, y), new(big.Rat).Add(rat(x), rat(y)), max(x.scale, y.scale)},
				"-": {new(Dec).Sub(x, y), new(big.Rat).Sub(rat(x), rat(y)), max(x.scale, y.scale)},
				"*": {new(Dec).Mul(x, y), new(big.Rat).Mul(rat(x), rat(y)), x.scale + y.scale},
			} {
				if rat(test.got).Cmp(test.want) != 0 || test.got.scale != test.scale {
					t.Fatalf("%s %s %s is %s with scale %d", x, name, y, test.got, test.got.scale)
				}
			}
			alias := new(Dec).Set(x)
			if alias.Sub(alias, y); rat(alias).Cmp(new(big.Rat).Sub(rat(x), rat(y))) != 0 {
				t.Fatalf("%s -= %s is %s", x, y, alias)
			}
		}
		if got := new(Dec).Neg(x); rat(got).Cmp(new(big.Rat).Neg(rat(x))) != 0 || got.Sign() != -x.Sign() {
			t.Errorf("-%s is %s", x, got)
		}
	}
}

func TestRound(t *testing.T) {
	for _, x := range numbers() {
		for scale := Scale(-12); scale <= 12; scale++ {
			unit := rat(NewDec(1, scale))
			for _, r := range []Rounder{RoundUp, RoundDown} {
				got := new(Dec).Round(x, scale, r)
				// It has moved by less than a unit, and not towards zero or not away from it.
				moved := new(big.Rat).Sub(new(big.Rat).Abs(rat(got)), new(big.Rat).Abs(rat(x)))
				if new(big.Rat).Abs(moved).Cmp(unit) >= 0 || got.scale != scale ||
					r == RoundUp && moved.Sign() < 0 || r == RoundDown && moved.Sign() > 0 {
					t.Fatalf("%s rounded (up: %v) to scale %d is %s", x, bool(r), scale, got)
				}
				if alias := new(Dec).Set(x); alias.Round(alias, scale, r).Cmp(got) != 0 {
					t.Fatalf("%s rounded in place is %s, want %s", x, alias, got)
				}
			}
		}
	}
}

func TestStrings(t *testing.T) {
	for _, test := range []struct {
		in, out string
		scale   Scale
	}{
		{"0", "0", 0}, {"0.00", "0.00", 2}, {"12", "12", 0}, {"-12.5", "-12.5", 1}, {"+.5", "0.5", 1}, {"5.", "5", 0}, {"-.05", "-0.05", 2},
		{"00012", "12", 0}, {strings.Repeat("9", MaxDigits), strings.Repeat("9", MaxDigits), 0},
	} {
		x, ok := new(Dec).SetString(test.in)
		if !ok || x.String() != test.out || x.Scale() != test.scale {
			t.Errorf("%q is %s, %v", test.in, x, ok)
		}
	}
	if got := NewDec(-12, -3).String(); got != "-12000" {
		t.Errorf("-12e3 is %s", got)
	}
	for _, bad := range []string{"", ".", "+", "-", "1-", "1e3", "1.2.3", "+-1", "0x1", "1_0", " 1", "١", strings.Repeat("9", MaxDigits+1)} {
		if x, ok := new(Dec).SetString(bad); ok {
			t.Errorf("%q is %s", bad, x)
		}
	}
}

// However large an exponent is, numbers stay of a size that can be calculated with.
func TestBounds(t *testing.T) {
	large, small := NewDec(1, math.MinInt32), NewDec(1, math.MaxInt32)
	if large.Scale() != -MaxDigits || small.Scale() != MaxDigits {
		t.Fatalf("scales are %d and %d", large.Scale(), small.Scale())
	}
	if large.Cmp(small) != 1 || small.Sign() != 1 {
		t.Error("bounded numbers compare as nobody would expect")
	}
	const most = 14_000 // bits: four thousand digits, the product of two sums
	for name, x := range map[string]*Dec{
		"sum":     new(Dec).Add(large, small),
		"product": new(Dec).Mul(new(Dec).Add(large, small), new(Dec).Add(large, small)),
		"rounded": new(Dec).Round(large, math.MaxInt32, RoundUp),
	} {
		if bits := x.UnscaledBig().BitLen(); bits > most {
			t.Errorf("%s has %d bits", name, bits)
		}
	}
	if got := new(Dec).Round(small, 9, RoundUp); got.Cmp(NewDec(1, 9)) != 0 {
		t.Errorf("the smallest number rounded up is %s", got)
	}
}

func TestUnscaled(t *testing.T) {
	if u, ok := NewDec(math.MinInt64, 3).Unscaled(); u != math.MinInt64 || !ok {
		t.Errorf("%d, %v", u, ok)
	}
	x := NewDec(math.MaxInt64, 0)
	x.UnscaledBig().Add(x.UnscaledBig(), big.NewInt(1))
	if _, ok := x.Unscaled(); ok {
		t.Error("2**63 fits")
	}
}
