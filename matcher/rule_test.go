// SPDX-License-Identifier: Apache-2.0

package matcher_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/xspin/xspin/matcher"
)

func TestRule(t *testing.T) {
	frame := []byte{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99}
	for _, tt := range []struct {
		name string
		rule matcher.Rule
		need int
		want bool
	}{
		{"words are big-endian", matcher.Rule{1, 0xffffffff, 0x44556677, 0x44556677}, 8, true},
		{"words are not little-endian", matcher.Rule{1, 0xffffffff, 0x77665544, 0x77665544}, 8, false},
		{"the mask hides the other bytes", matcher.Rule{1, 0x00ff0000, 0x00550000, 0x00550000}, 6, true},
		{"the bounds are inclusive below", matcher.Rule{1, 0xff, 0x77, 0x78}, 8, true},
		{"the bounds are inclusive above", matcher.Rule{1, 0xff, 0x76, 0x77}, 8, true},
		{"one below the start", matcher.Rule{1, 0xff, 0x78, 0x79}, 8, false},
		{"one above the end", matcher.Rule{1, 0xff, 0x75, 0x76}, 8, false},
		{"ranges compare numbers, not bytes swapped", matcher.Rule{1, 0xffff, 0x6600, 0x6700}, 8, true},
		{"a word that ends with the frame, its missing half masked out", matcher.Rule{2, 0xffff0000, 0x88990000, 0x88990000}, 10, true},
		{"one selected byte is missing", matcher.Rule{2, 0xffffff00, 0x88990000, 0x88990000}, 11, false},
		{"one selected bit of a missing byte", matcher.Rule{2, 0xffff8000, 0, 0xffffffff}, 11, false},
		{"the whole word is missing", matcher.Rule{3, 0xffffffff, 0, 0xffffffff}, 16, false},
		{"mask 0 needs no bytes and compares 0", matcher.Rule{100, 0, 0, 5}, 0, true},
		{"mask 0 compares 0, not what is there", matcher.Rule{1, 0, 1, 0xffffffff}, 0, false},
		{"Empty always holds", matcher.Empty, 0, true},
		{"False never holds", matcher.False, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.rule.Match(frame); got != tt.want {
				t.Errorf("Match is %v", got)
			}
			if got := tt.rule.Need(); got != tt.need {
				t.Errorf("Need is %d, not %d", got, tt.need)
			}
		})
	}
	if !matcher.Empty.Match(nil) || matcher.False.Match(nil) {
		t.Error("Empty and False look at the frame")
	}
}

func TestRuleValidate(t *testing.T) {
	for _, tt := range []struct {
		name string
		rule matcher.Rule
		want string // in the error; empty for a valid rule
	}{
		{"the last word", matcher.Rule{127, 0xff, 1, 1}, ""},
		{"one word too far", matcher.Rule{128, 0xff, 1, 1}, "word 128 is out of range"},
		{"a negative word", matcher.Rule{-1, 0xff, 1, 1}, "word -1 is out of range"},
		{"the constant False", matcher.False, ""},
		{"a second spelling of False", matcher.Rule{1, 0, 1, 0}, "start 0x00000001 is greater than end 0x00000000"},
		{"start behind end", matcher.Rule{0, 0xff, 3, 2}, "start 0x00000003 is greater than end 0x00000002"},
		{"a value outside its mask", matcher.Rule{3, 0xffff0000, 0x0800, 0x0800}, "bits 0x00000800 outside mask 0xffff0000"},
		{"a range outside its mask", matcher.Rule{3, 0xff00, 0x01, 0xff}, "no word under mask 0x0000ff00"},
		{"a range whose first possible value is its end", matcher.Rule{3, 0xff00, 0x01, 0x100}, ""},
		{"a range that ends one short of it", matcher.Rule{3, 0xf0f0, 0x1011, 0x101f}, "so it can never match"},
		{"a range that just reaches it across a gap in the mask", matcher.Rule{3, 0xf0f0, 0x10f1, 0x2000}, ""},
		{"a range above the mask", matcher.Rule{3, 0xff, 0x100, 0xffffffff}, "so it can never match"},
		{"mask 0 and a start of 1", matcher.Rule{0, 0, 1, 2}, "so it can never match"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.rule.Validate()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error is %v, want %q", err, tt.want)
			}
			if err != nil && !errors.Is(err, matcher.ErrRule) {
				t.Error("error does not wrap ErrRule")
			}
		})
	}
}

func TestRuleset(t *testing.T) {
	frame := []byte{1, 2, 3, 4}
	yes, no := matcher.Rule{0, 0xff, 4, 4}, matcher.Rule{0, 0xff, 5, 5}
	for _, tt := range []struct {
		name  string
		mode  matcher.Mode
		rules []matcher.Rule
		want  bool
	}{
		{"And of no rules matches everything", matcher.And, nil, true},
		{"Or of no rules matches nothing", matcher.Or, nil, false},
		{"And of rules that all hold", matcher.And, []matcher.Rule{yes, yes}, true},
		{"And with a last rule that fails", matcher.And, []matcher.Rule{yes, no}, false},
		{"Or with only the last rule holding", matcher.Or, []matcher.Rule{no, yes}, true},
		{"Or of rules that all fail", matcher.Or, []matcher.Rule{no, no}, false},
		{"Or with Empty", matcher.Or, []matcher.Rule{no, matcher.Empty}, true},
		{"And with False", matcher.And, []matcher.Rule{yes, matcher.False}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rs := matcher.Ruleset{Name: "x", Mode: tt.mode, Rules: tt.rules, EOM: &matcher.False}
			if got := rs.Match(frame); got != tt.want {
				t.Errorf("Match is %v", got)
			}
		})
	}
}

func TestRulesetValidate(t *testing.T) {
	bad := matcher.Rule{128, 0xff, 1, 1}
	for _, tt := range []struct {
		name string
		rs   matcher.Ruleset
		want string
	}{
		{"eight rules", matcher.Ruleset{Name: "x", Rules: make([]matcher.Rule, 8)}, ""},
		{"nine rules", matcher.Ruleset{Name: "x", Rules: make([]matcher.Rule, 9)}, "9 rules: want at most 8"},
		{"no name", matcher.Ruleset{}, "name is missing"},
		{"a name with a space", matcher.Ruleset{Name: "a b"}, "only letters"},
		{"a name of 63 bytes", matcher.Ruleset{Name: strings.Repeat("a", 63)}, ""},
		{"a name of 64 bytes", matcher.Ruleset{Name: strings.Repeat("a", 64)}, "64 bytes long: want at most 63"},
		{"an unknown mode", matcher.Ruleset{Name: "x", Mode: 2}, "mode 2"},
		{"a bad second rule", matcher.Ruleset{Name: "x", Rules: []matcher.Rule{matcher.Empty, bad}}, "rule 1:"},
		{"a bad EOM rule", matcher.Ruleset{Name: "x", EOM: &bad}, "EOM rule:"},
		{"a known format", matcher.Ruleset{Name: "x", Format: "flow"}, ""},
		{"an unknown format", matcher.Ruleset{Name: "x", Format: "flaw"}, "packet, flow, slmp, slmp6"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.rs.Validate()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("error is %v, want %q", err, tt.want)
			}
			if err != nil && !errors.Is(err, matcher.ErrRuleset) {
				t.Error("error does not wrap ErrRuleset")
			}
		})
	}
}

func TestUDPPortThatARulesetPins(t *testing.T) {
	for text, want := range map[string]uint16{
		"a: slmp":      matcher.SLMPPort,
		"a: slmp6":     matcher.SLMPPort,
		"a: udp(7)":    7,
		"a: udp":       0,
		"a: tcp(7)":    0,
		"a: icmp-echo": 0,
		"a: match-all": 0,
		"a: bypass":    0,
	} {
		rs, err := matcher.ParseRuleset(text)
		if err != nil {
			t.Fatal(err)
		}
		port, ok := rs.UDPPort()
		if port != want || ok != (want != 0) {
			t.Errorf("%s: port %d, %v, want %d", text, port, ok, want)
		}
	}
	rs := matcher.UDPPort(7)
	rs.Rules[2].End = 8 << 16
	if port, ok := rs.UDPPort(); ok {
		t.Errorf("ports 7 and 8: %d", port)
	}
	rs = matcher.UDPPort(7)
	rs.Mode = matcher.Or
	if port, ok := rs.UDPPort(); ok {
		t.Errorf("port 7 or UDP: %d", port)
	}
}
