// SPDX-License-Identifier: Apache-2.0

package impair_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xspin/xspin/netns/impair"
	"github.com/xspin/xspin/xsk"
)

func TestConfigIsChecked(t *testing.T) {
	type cfg = impair.Config
	for _, tc := range []struct {
		name string
		cfg  cfg
		want string // "": it is fine
	}{
		{"nothing is fine", cfg{}, ""},
		{"everything at once is fine", cfg{Loss: 1, Duplicate: 1, Corrupt: 1, Reorder: 1, Delay: time.Second, Rate: 1e9, Seed: math.MaxUint64, Direction: impair.ToHost}, ""},
		{"more than all cannot be lost", cfg{Loss: 1.0001}, "loss 100.01%, want 0% to 100%"},
		{"less than none cannot be lost", cfg{Loss: -0.01}, "loss -1%, want 0% to 100%"},
		{"no number is no probability", cfg{Duplicate: math.NaN()}, "dup NaN%"},
		{"corruption has the limits of loss", cfg{Corrupt: 2}, "corrupt 200%"},
		{"reordering has the limits of loss", cfg{Reorder: 2, Delay: 1}, "reorder 200%"},
		{"reordering needs a delay", cfg{Reorder: 0.01}, "reorder 1% needs a delay"},
		{"a delay is not negative", cfg{Delay: -1}, "delay -1ns, want 0s to 1s"},
		{"1 s and more is too long a delay", cfg{Delay: time.Second + 1}, "want 0s to 1s"},
		{"8 kbit/s is fine", cfg{Rate: 8000}, ""},
		{"less is too slow", cfg{Rate: 7999}, "rate 7.999kbit, want 8kbit to 100gbit"},
		{"100 Gbit/s is fine", cfg{Rate: 1e11}, ""},
		{"more is too fast", cfg{Rate: 1e11 + 1}, "want 8kbit to 100gbit"},
		{"trains go with loss", cfg{Loss: 0.1, Duplicate: 0.1, Trains: true, Direction: impair.ToHost}, ""},
		{"trains do not wait", cfg{Trains: true, Delay: 1}, "corrupt, delay and rate cut them"},
		{"trains have no limit", cfg{Trains: true, Rate: 8000}, "corrupt, delay and rate cut them"},
		{"trains have no checksums", cfg{Trains: true, Corrupt: 0.1}, "corrupt, delay and rate cut them"},
		{"there are three directions", cfg{Direction: 3}, "direction 3, want 0 to 2"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.cfg.Check()
			switch {
			case tc.want == "" && err != nil:
				t.Errorf("got %v, want no error", err)
			case tc.want != "" && (!errors.Is(err, impair.ErrConfig) || !strings.Contains(err.Error(), tc.want)):
				t.Errorf("got %v, want %v with %q", err, impair.ErrConfig, tc.want)
			}
		})
	}
}

func TestParseFraction(t *testing.T) {
	for _, tc := range []struct {
		text string
		want float64
		ok   bool
	}{
		{"5%", 0.05, true}, {"0.1%", 0.001, true}, {"0%", 0, true}, {"100%", 1, true}, {"1e-3%", 1e-5, true},
		{"100.1%", 0, false}, {"-1%", 0, false}, {"NaN%", 0, false}, {"%", 0, false}, {"5", 0, false}, {"0.05", 0, false}, {"", 0, false}, {"5 %", 0, false}, {"5%%", 0, false},
	} {
		got, err := impair.ParseFraction(tc.text)
		if (err == nil) != tc.ok || math.Abs(got-tc.want) > 1e-15 {
			t.Errorf("%q: got %v, %v, want %v, fine: %v", tc.text, got, err, tc.want, tc.ok)
		}
		if err == nil {
			if back, err := impair.ParseFraction(impair.FormatFraction(got)); err != nil || math.Abs(back-got) > 1e-12 {
				t.Errorf("%q is formatted as %s", tc.text, impair.FormatFraction(got))
			}
		}
	}
}

func TestParseRate(t *testing.T) {
	for _, tc := range []struct {
		text string
		want uint64
		out  string
	}{
		{"10mbit", 10e6, "10mbit"}, {"1gbit", 1e9, "1gbit"}, {"1.5gbit", 15e8, "1.5gbit"}, {"8kbit", 8000, "8kbit"}, {"8000", 8000, "8kbit"}, {"9000bit", 9000, "9kbit"},
		{"1Gbit", 1e9, "1gbit"}, {"100gbit", 1e11, "100gbit"}, {"0", 0, "0bit"}, {"0mbit", 0, "0bit"}, {"123456789", 123456789, "123456.789kbit"},
		{"1kbps", 8000, "8kbit"}, {"1mbps", 8e6, "8mbit"}, {"1mibit", 1 << 20, "1048.576kbit"}, {"1kibps", 8192, "8.192kbit"}, {"1000bps", 8000, "8kbit"}, {"0.1tbit", 1e11, "100gbit"},
	} {
		got, err := impair.ParseRate(tc.text)
		if err != nil || got != tc.want || impair.FormatRate(got) != tc.out {
			t.Errorf("%q: got %d, %v, as %s, want %d as %s", tc.text, got, err, impair.FormatRate(got), tc.want, tc.out)
		}
		if back, err := impair.ParseRate(tc.out); err != nil || back != tc.want {
			t.Errorf("%q back: got %d, %v, want %d", tc.out, back, err, tc.want)
		}
	}
	for _, text := range []string{"", "bit", "x", "5x", "-1mbit", "7999", "100.1gbit", "nanmbit", "infbit", "1 mbit", "1e30"} {
		if got, err := impair.ParseRate(text); err == nil || !strings.Contains(err.Error(), "8kbit to 100gbit") {
			t.Errorf("%q: got %d, %v, want an error with the range", text, got, err)
		}
	}
}

func FuzzParseRate(f *testing.F) {
	f.Add("10mbit")
	f.Add("1e3kibps")
	f.Fuzz(func(t *testing.T, s string) {
		bits, err := impair.ParseRate(s)
		if err != nil {
			return
		}
		if bits != 0 && (bits < impair.MinRate || bits > impair.MaxRate) {
			t.Fatalf("%q is %d bit/s", s, bits)
		}
		if back, err := impair.ParseRate(impair.FormatRate(bits)); err != nil || back != bits {
			t.Fatalf("%q is %d bit/s, written %s, read %d, %v", s, bits, impair.FormatRate(bits), back, err)
		}
	})
}

func TestConfigComesBackFromThePrograms(t *testing.T) {
	for _, c := range []impair.Config{
		{Seed: 1},
		{Loss: 0.05, Duplicate: 0.01, Reorder: 0.03, Corrupt: 0.001, Delay: 2 * time.Millisecond, Rate: 1e9, Seed: 7},
		{Loss: 1, Seed: 3, Direction: impair.FromHost},
		{Loss: 1.0 / 3, Seed: 3, Direction: impair.ToHost},
	} {
		got := c.RoundTrip()
		if !got.Equal(c) || !c.Equal(got) {
			t.Errorf("got %v, want %v", got, c)
		}
		if c.Loss != 1.0/3 && got != c {
			t.Errorf("got %#v, want %#v", got, c)
		}
		for name, change := range map[string]func(*impair.Config){
			"loss": func(c *impair.Config) { c.Loss /= 2; c.Loss += 1e-6 }, "seed": func(c *impair.Config) { c.Seed++ },
			"delay": func(c *impair.Config) { c.Delay++ }, "rate": func(c *impair.Config) { c.Rate++ },
			"direction": func(c *impair.Config) { c.Direction = (c.Direction + 1) % 3 }, "trains": func(c *impair.Config) { c.Trains = !c.Trains },
		} {
			other := c
			if change(&other); other.Equal(c) {
				t.Errorf("%v: another %s is the same", c, name)
			}
		}
	}
}

// Each decision has the probability asked for, whatever the others are, and no
// stream is another one again.
func TestDecisionsAreAsProbableAsAsked(t *testing.T) {
	const n = 200_000
	c := impair.Config{Loss: 0.05, Duplicate: 0.01, Corrupt: 0.001, Reorder: 0.3, Seed: 7}
	var ways [2][n]impair.Fate
	for i, way := range []impair.Direction{impair.FromHost, impair.ToHost} {
		for k := range ways[i] {
			ways[i][k] = impair.FateOf(c, way, uint64(k), 1514)
		}
		for name, d := range map[string]struct {
			p    float64
			what func(impair.Fate) bool
		}{
			"loss":                      {c.Loss, func(f impair.Fate) bool { return f.Lost }},
			"duplication":               {c.Duplicate, func(f impair.Fate) bool { return f.Duplicated }},
			"corruption":                {c.Corrupt, func(f impair.Fate) bool { return f.Corrupted }},
			"reordering":                {c.Reorder, func(f impair.Fate) bool { return f.Reordered }},
			"loss and reordering":       {c.Loss * c.Reorder, func(f impair.Fate) bool { return f.Lost && f.Reordered }},
			"loss and duplication":      {c.Loss * c.Duplicate, func(f impair.Fate) bool { return f.Lost && f.Duplicated }},
			"a bit in the second half":  {0.5, func(f impair.Fate) bool { return f.Bit >= 1500*4 }},
			"an odd bit of a lost one":  {c.Loss / 2, func(f impair.Fate) bool { return f.Lost && f.Bit%2 == 1 }},
			"duplication and odd bits":  {c.Duplicate / 2, func(f impair.Fate) bool { return f.Duplicated && f.Bit%2 == 1 }},
			"corruption and reordering": {c.Corrupt * c.Reorder, func(f impair.Fate) bool { return f.Corrupted && f.Reordered }},
		} {
			k := 0
			for _, f := range ways[i] {
				if d.what(f) {
					k++
				}
			}
			wantBinomial(t, way.String()+" "+name, k, n, d.p)
		}
	}
	same := 0
	for k := range n {
		if ways[0][k].Lost && ways[1][k].Lost {
			same++
		}
	}
	wantBinomial(t, "lost in both directions", same, n, c.Loss*c.Loss)
}

// wantBinomial fails for what happens once in a million times.
func wantBinomial(t *testing.T, what string, k, n int, p float64) {
	t.Helper()
	mean, sigma := float64(n)*p, math.Sqrt(float64(n)*p*(1-p))
	if d := math.Abs(float64(k) - mean); d > 5*sigma+0.5 {
		t.Errorf("%s: %d of %d, want %.0f, it is off by %.1f sigma", what, k, n, mean, d/sigma)
	}
}

func TestCapacityIsThatOfTheWire(t *testing.T) {
	for _, tc := range []struct {
		delay time.Duration
		rate  uint64
		mtu   int
		want  int
	}{
		{time.Microsecond, 0, 1500, 1 << 14},
		{2 * time.Millisecond, 1e9, 1500, 1 << 14},
		{20 * time.Millisecond, 0, 1500, 1 << 15}, // 10 Gbit/s: 24768 frames
		{100 * time.Millisecond, 1e9, 1500, 1 << 14},
		{time.Second, 1e9, 1500, 1 << 17},
		{time.Second, 1e11, 65535, 1 << 17},
	} {
		if got := impair.Capacity(tc.delay, tc.rate, tc.mtu); got != tc.want {
			t.Errorf("%v at %d bit/s, MTU %d: %d, want %d", tc.delay, tc.rate, tc.mtu, got, tc.want)
		}
	}
}

func TestLineKeepsWholeFramesInOrder(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	type frame struct {
		due   time.Duration
		descs []xsk.Desc
	}
	const size = 16
	l := impair.NewLine(size)
	var model []frame
	held, refused, next := 0, 0, uint64(0)
	for range 100_000 {
		if rnd.IntN(2) == 0 {
			f := frame{due: time.Duration(next)}
			for i := range 1 + rnd.IntN(4) {
				if i > 0 {
					f.descs[i-1].Options = xsk.Continued
				}
				f.descs = append(f.descs, xsk.Desc{Addr: next, Len: uint32(i)})
				next++
			}
			ok := l.Push(f.due, f.descs)
			if want := held+len(f.descs) <= size; ok != want {
				t.Fatalf("frame of %d on a line that holds %d: %v, want %v", len(f.descs), held, ok, want)
			}
			if ok {
				model = append(model, f)
				held += len(f.descs)
			} else {
				refused++
			}
			continue
		}
		due, descs := l.Pop()
		if len(model) == 0 {
			if descs != nil {
				t.Fatalf("got %v of an empty line", descs)
			}
			continue
		}
		if want := model[0]; due != want.due || !slices.Equal(descs, want.descs) {
			t.Fatalf("got %v %v, want %v", due, descs, want)
		}
		held -= len(descs)
		model = model[1:]
	}
	if refused == 0 {
		t.Error("the line was never full")
	}
}
