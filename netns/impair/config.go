// SPDX-License-Identifier: Apache-2.0

// Package impair impairs a network: loss, duplication, corruption, a limited rate,
// delay and reordering, for the frames that pass through a namespace between the
// two ends of a lab. Package netns builds that namespace.
//
// An eBPF program at tc ingress (bpf/src/impair.bpf.c) loses, duplicates and
// corrupts frames, at some 100 ns a frame; a token bucket of the kernel limits the
// rate. A [Relay] delays frames.
//
// Decisions are pseudo-random, by the seed, the direction and the number of the
// frame: the same frames in the same order are treated the same.
package impair

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// ErrConfig is returned, wrapped, for a Config that cannot work. The message
// names the field, in lower case.
var ErrConfig = errors.New("invalid impairment")

// Direction says which frames are impaired.
type Direction int

const (
	Both     Direction = iota // each with a random stream of its own
	FromHost                  // those from the host to the NIC
	ToHost                    // those from the NIC to the host
)

var directionNames = [...]string{Both: "both", FromHost: "from-host", ToHost: "to-host"}

func (d Direction) String() string {
	if d < 0 || int(d) >= len(directionNames) {
		return fmt.Sprintf("Direction(%d)", int(d))
	}
	return directionNames[d]
}

// ParseDirection reads both, from-host or to-host.
func ParseDirection(s string) (Direction, error) {
	for d, name := range directionNames {
		if s == name {
			return Direction(d), nil
		}
	}
	return 0, fmt.Errorf("want %s", strings.Join(directionNames[:], ", "))
}

// covers reports whether frames of way, FromHost or ToHost, are impaired.
func (d Direction) covers(way Direction) bool { return d == Both || d == way }

// Limits of a Config.
const (
	MaxDelay = time.Second
	MinRate  = 8_000           // bit/s
	MaxRate  = 100_000_000_000 // bit/s
)

// Config says what happens to frames. The zero value lets all pass.
type Config struct {
	// Loss, Duplicate, Corrupt and Reorder are probabilities, 0 to 1, for
	// each frame. They are independent of each other and of other frames.
	//
	// A frame that is not lost may be duplicated, corrupted, or both. If both, the
	// copy, which goes first, is intact. Corruption flips one bit after the
	// Ethernet header of an IP packet. It spares ARP, which has no checksum.
	Loss, Duplicate, Corrupt float64
	// Reorder needs a Delay: a reordered frame is sent at once, and overtakes
	// those that wait.
	Reorder float64
	// Delay is how long frames wait, 0 to 1 s. They leave in the order in which
	// they came, no earlier than that, and up to 100 us later.
	Delay time.Duration
	// Rate is the limit in bits per second, 8 kbit to 100 gbit, with frames
	// counted from their Ethernet header. 0 is no limit.
	Rate uint64
	// Seed of the random numbers. Defaults to 1.
	Seed uint64
	// Direction defaults to Both.
	Direction Direction
	// Trains lets trains pass in one piece, as they do over a plain veth pair: UDP datagrams over
	// IPv4 that their sender leaves to a device to cut (UDP_SEGMENT). Each segment is lost or not,
	// as a frame is. Linux cannot take a segment out of a train, so a copy of another one is in
	// the place of one that is lost. If the last is shorter than the others, and lost, all are.
	// A train is duplicated as a whole. Trains goes with Loss and Duplicate alone, and what XDP at
	// an end sends does not arrive.
	Trains bool
}

// WithDefaults fills in the seed.
func (c Config) WithDefaults() Config {
	if c.Seed == 0 {
		c.Seed = 1
	}
	return c
}

// Check validates the config.
func (c Config) Check() error {
	for _, p := range []struct {
		name  string
		value float64
	}{{"loss", c.Loss}, {"dup", c.Duplicate}, {"reorder", c.Reorder}, {"corrupt", c.Corrupt}} {
		if !(p.value >= 0 && p.value <= 1) { // refuses NaN as well
			return fmt.Errorf("%w: %s %s, want 0%% to 100%%", ErrConfig, p.name, FormatFraction(p.value))
		}
	}
	switch {
	case c.Delay < 0 || c.Delay > MaxDelay:
		return fmt.Errorf("%w: delay %v, want 0s to %v", ErrConfig, c.Delay, MaxDelay)
	case c.Rate != 0 && (c.Rate < MinRate || c.Rate > MaxRate):
		return fmt.Errorf("%w: rate %s, want %s to %s", ErrConfig, FormatRate(c.Rate), FormatRate(MinRate), FormatRate(MaxRate))
	case c.Direction < Both || c.Direction > ToHost:
		return fmt.Errorf("%w: direction %d, want %d to %d", ErrConfig, c.Direction, Both, ToHost)
	case c.Reorder > 0 && c.Delay == 0:
		return fmt.Errorf("%w: reorder %s needs a delay: a reordered frame overtakes those that wait",
			ErrConfig, FormatFraction(c.Reorder))
	case c.Trains && (c.Corrupt > 0 || c.Delay > 0 || c.Rate > 0):
		return fmt.Errorf("%w: trains go with loss and dup alone: corrupt, delay and rate cut them", ErrConfig)
	}
	return nil
}

// String lists what is not zero, in the words of the command line.
func (c Config) String() string {
	var parts []string
	for _, p := range []struct {
		name  string
		value float64
	}{{"loss", c.Loss}, {"dup", c.Duplicate}, {"reorder", c.Reorder}, {"corrupt", c.Corrupt}} {
		if p.value != 0 {
			parts = append(parts, p.name+" "+FormatFraction(p.value))
		}
	}
	if c.Delay != 0 {
		parts = append(parts, "delay "+c.Delay.String())
	}
	if c.Rate != 0 {
		parts = append(parts, "rate "+FormatRate(c.Rate))
	}
	if c.Trains {
		parts = append(parts, "trains")
	}
	if parts == nil {
		return "nothing impaired"
	}
	if c.Direction != Both {
		parts = append(parts, "direction "+c.Direction.String())
	}
	return strings.Join(append(parts, fmt.Sprintf("seed %d", c.Seed)), ", ")
}

// ParseFraction reads a percentage, with the sign %, because a bare 0.05 would be
// ambiguous.
func ParseFraction(s string) (float64, error) {
	const want = "want 0% to 100%, with the sign: 5%"
	n, ok := strings.CutSuffix(s, "%")
	if !ok {
		return 0, errors.New(want)
	}
	v, err := strconv.ParseFloat(n, 64)
	if err != nil || !(v >= 0 && v <= 100) {
		return 0, errors.New(want)
	}
	return v / 100, nil
}

// FormatFraction is the inverse of ParseFraction, to nine digits.
func FormatFraction(p float64) string { return strconv.FormatFloat(p*100, 'g', 9, 64) + "%" }

// units of rates, as in tc(8), in bit/s. A unit comes before those that it ends in.
var units = []struct {
	suffix string
	bits   float64
}{
	{"kibit", 1 << 10}, {"mibit", 1 << 20}, {"gibit", 1 << 30}, {"tibit", 1 << 40},
	{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"tbit", 1e12}, {"bit", 1},
	{"kibps", 8 << 10}, {"mibps", 8 << 20}, {"gibps", 8 << 30}, {"tibps", 8 << 40},
	{"kbps", 8e3}, {"mbps", 8e6}, {"gbps", 8e9}, {"tbps", 8e12}, {"bps", 8},
	{"", 1},
}

// ParseRate reads a rate as tc does: 10mbit, 1gbit, 1.5gbit. As there, bps and its
// multiples are bytes per second, and a bare number is bit/s. 0 is no limit; other
// rates are MinRate to MaxRate.
func ParseRate(s string) (uint64, error) {
	for _, u := range units {
		n, ok := strings.CutSuffix(strings.ToLower(s), u.suffix)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(n, 64)
		if err != nil || !(v == 0 || v*u.bits >= MinRate && v*u.bits <= MaxRate) {
			break
		}
		return uint64(math.Round(v * u.bits)), nil
	}
	return 0, fmt.Errorf("want a rate as tc has it: 10mbit, 1gbit (%s to %s, 0 for no limit)", FormatRate(MinRate), FormatRate(MaxRate))
}

// FormatRate writes a rate so that ParseRate reads it.
func FormatRate(bits uint64) string {
	for _, u := range []struct {
		name string
		bits uint64
	}{{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}} {
		if bits >= u.bits && bits%(u.bits/1000) == 0 {
			return strconv.FormatFloat(float64(bits)/float64(u.bits), 'f', -1, 64) + u.name
		}
	}
	return strconv.FormatUint(bits, 10) + "bit"
}

// A threshold is a probability in the unit of the programs: 2^32 is always.
func threshold(p float64) uint64 { return uint64(math.Round(p * (1 << 32))) }

// fraction is the inverse of threshold: of the probabilities whose threshold is t, it
// returns the one with the fewest digits.
func fraction(t uint64) float64 {
	exact := float64(t) / (1 << 32)
	for scale := 1.0; scale <= 1e9; scale *= 10 {
		if p := math.Round(exact*scale) / scale; threshold(p) == t {
			return p
		}
	}
	return exact
}
